"""A comment about an answer becomes an update task of what the policy answers once it is told."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from gateway_helpers import own_client
from ray.actor import ActorHandle
from scripted import picture_url

from pixelis.actors import placement
from pixelis.actors.evolution import Evolution
from pixelis.actors.group_views import fetch
from pixelis.actors.memory import Memory
from pixelis.actors.policy_store import PolicyStore
from pixelis.actors.serving import online
from pixelis.config import Config, load
from pixelis.datasets import card_questions
from pixelis.datasets.media import open_media
from pixelis.evolution import privacy
from pixelis.evolution.words import original
from pixelis.jobs import serve as serve_job
from pixelis.jobs import sft
from pixelis.operations.image import data_url
from pixelis.records import Trajectory
from pixelis.serve.agent_types import Backends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
COMMENT = "No, it is say 8 to anna@example.com"
"""What the scripted policy obeys; the address is redacted before anything is done with it."""


@pytest.fixture
def settings_of_words(settings: Callable[..., Config], tmp_path: Path) -> Config:
    own = ["evolution.words=true", "evolution.objective=answer", "evolution.batch=1", f"run.dir={tmp_path}"]
    own += ["memory.write_timeout_s=30", "serve.timeout_s=60", "evolution.gate=0.7"]
    own += ["evolution.queue=64"]  # with work after so many replies a comment is left out
    return settings(*own)


@pytest.fixture
def learning(settings_of_words: Config, backends: Backends) -> Iterator[tuple[Backends, ActorHandle]]:
    """The service's actors with an Evolution of its own, whose tasks a test takes in the learner's place."""
    store = PolicyStore.options(name="store-of-words").remote(settings_of_words.run.dir)
    evolution = Evolution.options(name="evolution-of-words").remote(
        settings_of_words, list(backends.generators), "store-of-words", memory=list(backends.memory)
    )
    ray.get(evolution.begin.remote(0, {"base": 0}, 0))
    yield dataclasses.replace(backends, evolution="evolution-of-words"), evolution
    for actor in (evolution, store):
        ray.kill(actor)


async def ask(client: httpx.AsyncClient, text: str, **more: Any) -> str:
    """The id of the stored experience of an answer."""
    reply = await client.post("/v1/agent", json={"question": text, "image": picture_url((90, 60)), **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["experience_id"]


async def counts(client: httpx.AsyncClient) -> Counter[str]:
    """The outcomes of words, and how often they were left out, without the label of the replica."""
    pattern = r"^pixelis_agent_(words_\w+|follow_skipped)_total\{.*\} (\S+)$"
    text = (await client.get("/metrics")).text
    return Counter({name: int(float(count)) for name, count in re.findall(pattern, text, re.MULTILINE)})


async def settle(client: httpx.AsyncClient, outcomes: int) -> Counter[str]:
    """The counts once there are so many outcomes."""
    async with asyncio.timeout(120):
        while (found := await counts(client)).total() < outcomes:
            assert not found["follow_skipped"], found
            await asyncio.sleep(0.1)
    return found


def test_a_comment_makes_one_task_without_its_words_on_the_prompt_of_the_answer(
    settings_of_words: Config, learning: tuple[Backends, ActorHandle]
) -> None:
    backends, evolution = learning

    async def scenario() -> None:
        memory = Memory(backends.memory, backends.namespace, settings_of_words.memory)
        async with own_client(settings_of_words, backends) as client:
            # A vote below the gate, so that the only tasks are those of words
            answered = await ask(client, "say 1,2,3,4")
            stored = await memory.get(answered)
            assert stored is not None
            assert original("img0") in await memory.pictures(answered)
            unlearnt = await ask(client, "say 1,2,3,4", learn=False)
            assert original("img0") not in await memory.pictures(unlearnt)
            comments = [(answered, COMMENT), (answered, "thank you"), (answered, ""), (unlearnt, COMMENT)]
            for id, comment in comments:
                body = {"experience_id": id, "correct": False, "comment": comment}
                reply = await client.post("/v1/feedback", json=body)
                assert reply.status_code == 200, reply.text
            assert await settle(client, 3) == {"words_sent": 1, "words_unclear": 2}
            batch = await asyncio.wait_for(evolution.next_batch.remote(0, 1, 0), 60)
            (group,), (views,) = batch.groups, fetch(batch.views)
            assert group.question.meta["pseudo_label"] == "8"
            assert len(group.trajectories) == settings_of_words.serve.samples
            for trajectory in group.trajectories:
                assert trajectory.transplanted
                assert trajectory.turns[0] == stored.trajectory.turns[0]
                assert len(views[trajectory.id]) == len(trajectory.images)
                assert "No, it is" not in trajectory.model_dump_json()
            stats = await evolution.stats.remote()
            assert (stats["received"], stats["held_out"], stats["disowned"]) == (1, 0, 0)

    asyncio.run(scenario())


@pytest.mark.long
def test_a_real_policy_that_is_corrected_looks_again(ray_cluster: None, tmp_path: Path) -> None:
    """pixelis-nano, taught by corrected conversations to look only when it is told that it was wrong."""
    own = ["sft.steps=150", "sft.batch=16", "data.demonstrations=cards:?split=train&corrected=0.3"]
    adapter = sft.run(load("configs/nano/sft.yaml", [*own, f"run.dir={tmp_path}/sft"]))
    small = ["serve.samples=8", "engine.cpus=0.1", "toolbox.workers=1", "toolbox.cpus=0", "memory.cpus=0"]
    small += [
        "evolution.words=true",
        "evolution.objective=answer",
        "evolution.cold_start=0",
        "serve.timeout_s=120",
    ]
    small += ["evolution.canary.enabled=false", "evolution.neighbours.k=0", "evolution.gate=0.6"]
    config = load("configs/nano/base.yaml", [*small, f"run.dir={tmp_path}/serve"])
    placed = placement.placed(config, learner=False, initial=str(adapter), job="words", online=True)
    with placed as actors, online(config, actors) as backend:
        assert backend.evolution is not None
        ray.get(backend.evolution.begin.remote(0, {"base": 0}, 0))
        asyncio.run(correct(config, serve_job.backends(actors, backend)))

        def transplanted(evolution: Any) -> list[Trajectory]:
            waiting = [trajectory for item in evolution.queue.items for trajectory in item.task.trajectories]
            return [trajectory for trajectory in waiting if trajectory.transplanted]

        told = ray.get(backend.evolution.__ray_call__.remote(transplanted))
    assert len(told) >= 3
    assert all(t.policy_turns == 2 for t in told if t.operations_ok == 1), "a look and an answer"
    assert any(t.operations_ok for t in told)
    assert not any("No, it is" in t.model_dump_json() for t in told)


async def correct(config: Config, backends: Backends) -> None:
    """Ask until twelve answers are wrong, and tell each what is right."""
    wrong = 0
    async with own_client(config, backends) as client:
        client.timeout = httpx.Timeout(200)
        for question in card_questions.read("cards:?split=test&seed=7", None, 0, 60, 1):
            picture = open_media(question.media[0], config.toolbox)
            assert isinstance(picture, np.ndarray)
            assert question.answers
            image = data_url(privacy.clean_png(picture))
            body = {"question": question.question, "image": image}
            reply = (await client.post("/v1/agent", json=body)).json()
            if reply["answer"] in (None, question.answers[0]) or reply["experience_id"] is None:
                continue
            said = {"experience_id": reply["experience_id"], "comment": f"No, it is a {question.answers[0]}."}
            assert (await client.post("/v1/feedback", json=said)).status_code == 200
            wrong += 1
            if wrong == 12:
                break
        figures = await settle(client, wrong)
        assert figures["words_sent_failed"] == 0
        assert figures["words_sent"] >= wrong / 4
