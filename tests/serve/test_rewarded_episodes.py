"""Rewarded episodes on a real memory and Evolution: experiences, one task, and what takes it back."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from gateway_helpers import messages, own_client, until
from scripted import picture_url

from pixelis.actors.episode_outcomes import experience_id
from pixelis.actors.episode_service import EpisodeService
from pixelis.actors.memory import Memory
from pixelis.config import Config
from pixelis.serve.agent_types import Backends

pytestmark = pytest.mark.slow


async def post(client: httpx.AsyncClient, url: str, **body: Any) -> dict[str, Any]:
    reply = await client.post(url, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_rewarded_group_is_stored_and_counts_once_until_feedback_calls_its_label_wrong(
    settings: Callable[..., Config], backends: Backends, tmp_path: Path
) -> None:
    config, name = settings("memory.write_timeout_s=30", "serve.timeout_s=60"), f"episodes-{tmp_path.name}"
    actor = EpisodeService.options(name=name).remote(
        config, backends.generators, None, backends.evolution, backends.memory
    )
    evolution = ray.get_actor(backends.evolution)

    def counted(what: str) -> int:
        return ray.get(evolution.stats.remote())[what] - before[what]

    async def scenario() -> None:
        memory = Memory(backends.memory, backends.namespace, config.memory)
        body = {"model": "pixelis-nano", "messages": messages("say 7", picture_url())}
        async with own_client(config, dataclasses.replace(backends, episodes=name)) as client:
            pair = [await post(client, "/v1/episodes", group="pair", samples=2) for _ in range(2)]
            for reward, episode in enumerate(pair):
                await post(client, f"{episode['base_url']}/chat/completions", **body)
                await post(client, f"/v1/episodes/{episode['id']}/reward", reward=reward)
                stored = await memory.get(experience_id(episode["id"]))
                assert stored is not None
                assert stored.trajectory.outcome == {"reward": reward}
                assert stored.verdict.reason == "rewarded"
                assert set(await memory.pictures(stored.id)) == {i.id for i in stored.trajectory.images}
            assert await asyncio.to_thread(until, lambda: counted("received") == 1)
            again = await post(client, f"/v1/episodes/{pair[1]['id']}/reward", reward=0.5)
            assert (again["reward"], counted("received")) == (1.0, 1)
            await post(client, "/v1/feedback", experience_id=stored.id, correct=False)
            assert await asyncio.to_thread(until, lambda: counted("disowned") == 1)

    before = ray.get(evolution.stats.remote())
    try:
        asyncio.run(scenario())
    finally:
        ray.kill(actor)
