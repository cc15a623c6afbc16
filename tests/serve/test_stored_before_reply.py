"""An ``experience_id`` is given only for what is on disk."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from gateway_helpers import STORE, messages, own_client
from scripted import picture_url
from small_disks import fill, small_disk

from pixelis.actors.evolution import Evolution
from pixelis.actors.memory_shard import place_shards
from pixelis.config import Config
from pixelis.serve.agent_types import Backends

pytestmark = pytest.mark.slow


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"question": "say 7", "image": picture_url(), "cache": False, **fields}
    reply = await client.post("/v1/agent", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def shown(client: httpx.AsyncClient, id: str) -> int:
    """The status of an experience; waits while its shard restarts."""
    while (status := (await client.get(f"/v1/experiences/{id}")).status_code) in (503, 504):
        await asyncio.sleep(0.2)
    return status


@pytest.fixture
def shard(
    settings: Callable[..., Config], backends: Backends, tmp_path: Path
) -> Iterator[tuple[Config, Backends, Any]]:
    """A memory shard of its own."""
    own = [
        f"memory.dir={tmp_path / 'memory'}",
        f"run.dir={tmp_path}",
        "evolution.alerts.every_s=0.1",
        "evolution.queue=64",
    ]
    config = settings(*own, "memory.write_timeout_s=60", "serve.timeout_s=60")
    names, shards = place_shards(config, f"durable-{tmp_path.name}")
    ray.get([shard.health.remote() for shard in shards])
    yield config, dataclasses.replace(backends, memory=tuple(names)), shards[0]
    for actor in shards:
        ray.kill(actor)


def test_an_experience_is_readable_at_once_and_after_a_kill(shard: tuple[Config, Backends, Any]) -> None:
    config, backends, actor = shard

    async def scenario() -> None:
        async with own_client(config, backends) as client:
            ids = []
            for _ in range(2):
                replies = await asyncio.gather(*(ask(client) for _ in range(4)))
                assert {reply["remembered"] for reply in replies} == {"yes"}
                ids += [reply["experience_id"] for reply in replies]
                assert [await shown(client, id) for id in ids[-4:]] == [200] * 4
                os.kill(ray.get(actor.health.remote())["pid"], signal.SIGKILL)  # right after the last reply
            assert [await shown(client, id) for id in ids] == [200] * 8
            body = {"model": "pixelis-nano", "messages": messages("say 7", picture_url())}
            fields = (await client.post("/v1/chat/completions", json=body)).json()["pixelis"]
            assert (fields["remembered"], await shown(client, fields["experience_id"])) == ("yes", 200)

    asyncio.run(scenario())


def test_remembering_later_gives_no_id(shard: tuple[Config, Backends, Any]) -> None:
    config, backends, _ = shard

    async def scenario() -> None:
        async with own_client(config, backends) as client:

            async def number_stored() -> int:
                return len((await client.get("/v1/experiences")).json()["data"])

            assert await number_stored() == 0
            later, never = await ask(client, remember="later"), await ask(client, remember=False)
            assert (later["experience_id"], later["remembered"]) == (None, "later")
            assert (never["experience_id"], never["remembered"]) == (None, "no")
            async with asyncio.timeout(60):
                while await number_stored() < 1:
                    await asyncio.sleep(0.05)

    asyncio.run(scenario())


def test_f21_a_full_disk_gives_no_id_and_one_alert_and_works_again(
    settings: Callable[..., Config],
    backends: Backends,
    tmp_path: Path,
    record_figures: Callable[..., None],
) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        own = [f"memory.dir={disk / 'memory'}", f"run.dir={tmp_path}", "evolution.alerts.every_s=0.1"]
        config = settings(*own, "evolution.queue=64", "memory.write_timeout_s=60", "serve.timeout_s=60")
        service = f"durable-{tmp_path.name}"
        names, shards = place_shards(config, service)
        store, generators = ray.get_actor(STORE), [ray.get_actor(name) for name in backends.generators]
        evolution = Evolution.options(name=f"{service}-evolution").remote(config, generators, store)
        ray.get([*(actor.health.remote() for actor in shards), evolution.health.remote()])

        async def scenario() -> dict[str, int]:
            own = dataclasses.replace(backends, memory=tuple(names), evolution=f"{service}-evolution")
            async with own_client(config, own) as client:

                async def health() -> dict[str, Any]:
                    reply = await client.get("/healthz")
                    assert reply.status_code == 200
                    return reply.json()

                async def until_status(status: str) -> dict[str, Any]:
                    async with asyncio.timeout(60):
                        while (current := await health())["status"] != status:
                            await asyncio.sleep(0.05)
                    return current

                async def alerts() -> list[str]:
                    return [a["metric"] for a in (await client.get("/v1/evolution")).json()["alerts"]]

                first = (await ask(client))["experience_id"]
                assert (await health())["memory"] == "ok"
                pid = ray.get(shards[0].health.remote())["pid"]
                ballast = fill(disk)
                replies = [await ask(client, learn=False) for _ in range(12)]
                given = [reply["experience_id"] for reply in replies if reply["experience_id"]]
                refused = {reply["remembered"] for reply in replies if reply["experience_id"] is None}
                assert refused == {"no space"}
                assert replies[-1]["answer"] == "7"
                assert (await until_status("degraded"))["memory"] == "no space"
                async with asyncio.timeout(60):
                    while "memory_refuses" not in await alerts():
                        await asyncio.sleep(0.05)
                assert ray.get(shards[0].health.remote())["pid"] == pid, "the shard did not survive"
                ballast.unlink()
                await until_status("ok")  # without a request
                last = (await ask(client))["experience_id"]
                os.kill(pid, signal.SIGKILL)
                lost = [id for id in [first, *given, last] if await shown(client, id) != 200]
                assert not lost
                assert (await alerts()).count("memory_refuses") == 1
                return {"replies": len(replies), "with_id": len(given), "lost": len(lost)}

        try:
            record_figures(**asyncio.run(scenario()))
            lines = (tmp_path / "alerts.jsonl").read_text().splitlines()
            assert [json.loads(line)["metric"] for line in lines].count("memory_refuses") == 1
        finally:
            for actor in [*shards, evolution]:
                ray.kill(actor)
