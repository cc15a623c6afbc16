"""A real Generator on nano: episodes streamed turn by turn, and cancelled episodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle
from scripted import picture_url

from pixelis.actors.generator import Generator
from pixelis.actors.generator_router import RolloutRequest
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import load
from pixelis.dialogue.session import SamplingParams
from pixelis.records import Exchange, Group, Media, Question
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import AgentQuery, Answer
from pixelis.serve.backends import Backends

pytestmark = pytest.mark.slow

OVERRIDES = ["toolbox.workers=1", "toolbox.cpus=0", "dialogue.max_turns_test=3"]


@pytest.fixture(scope="module")
def generator(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActorHandle]:
    folder: Path = tmp_path_factory.mktemp("streaming")
    store = PolicyStore.options(name="streaming-store").remote(str(folder))
    config = load(None, [*OVERRIDES, f"run.dir={folder}"])
    actor = Generator.options(name="streaming-generator", num_cpus=0.1).remote(config, "streaming-store")
    ray.get(actor.ready.remote(), timeout=60)
    yield actor
    ray.kill(actor)
    ray.kill(store)


def question() -> Question:
    media = [Media(id="img0", uri=picture_url((64, 64)))]
    return Question(id="q", question="How many shapes are there?", media=media)


def test_a_streamed_group_equals_its_events(generator: ActorHandle) -> None:
    async def listen() -> tuple[list[Any], Group, dict[str, Any]]:
        items = []
        async for ref in generator.stream.remote(RolloutRequest(question(), "g", 3, SamplingParams(1.0, seed=5), max_turns=3)):
            items.append(await ref)
        *events, group, views = items
        return [event for together in events for event in together], group, views

    events, group, views = asyncio.run(asyncio.wait_for(listen(), 60))
    assert set(views) == {t.id for t in group.trajectories}
    for sample, trajectory in enumerate(group.trajectories):
        streamed = [(turn, added) for s, turn, added in events if s == sample]
        recorded = [turn for turn in trajectory.turns if turn.role in ("assistant", "tool")]
        assert [t.text for t, _ in streamed] == [t.text for t in recorded]
        assert [t.role for t, _ in streamed] == [t.role for t in recorded]
        assert all(not t.tokens and not t.log_probs for t, _ in streamed)
        assert sum(len(added) for _, added in streamed) == len(views[trajectory.id]) - 1
        assert all(turn.tokens for turn in trajectory.turns)


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_episodes_leave_no_session(generator: ActorHandle, stream: bool) -> None:
    """An open session would delay the next version forever."""

    async def leave() -> None:
        agent = Agent(load(None, OVERRIDES), Backends(("streaming-generator",), "pixelis"))
        query = AgentQuery("How many shapes are there?", [picture_url((64, 64))], 8, SamplingParams(1.0), max_turns=3)
        with contextlib.suppress(TimeoutError):  # a fast machine may finish the first one
            for seconds in (0.02, 0.05, 0.1):
                if stream:
                    async with asyncio.timeout(5), contextlib.aclosing(agent.stream(query)) as items:
                        await anext(items)
                else:
                    await asyncio.wait_for(agent.answer(query), seconds)
        async with asyncio.timeout(10):
            while (health := await generator.health.remote())["sessions"] or health["pending"]:
                await asyncio.sleep(0.05)
        assert await generator.load.remote(0) == 0
        assert isinstance(await agent.answer(query), Answer)

    asyncio.run(asyncio.wait_for(leave(), 60))


def test_conversations_and_questions_without_pictures_are_answered(generator: ActorHandle) -> None:
    history = [Exchange(question="Is there a red frame?", answer="yes", media=["img0"])]
    sampling, picture = SamplingParams(1.0, seed=1), picture_url((64, 64))

    async def ask() -> list[Answer]:
        agent = Agent(load(None, OVERRIDES), Backends(("streaming-generator",), "pixelis"))
        queries = [
            AgentQuery("Which digit is in it?", [picture, picture], 2, sampling, max_turns=2, history=history),
            AgentQuery("Which digit is in it?", [picture], 2, sampling, max_turns=2),
            AgentQuery("Which digit is in it?", [], 2, sampling, operations=False, max_turns=2),
        ]
        return [await agent.answer(query) for query in queries]

    second, alone, blind = asyncio.run(asyncio.wait_for(ask(), 60))
    turns = second.winner.turns
    assert [turn.images for turn in turns[:2]] == [["img0"], ["img1"]]
    assert "<answer>yes</answer>" in turns[0].text
    assert sum(len(turn.tokens) for turn in turns[:2]) > len(alone.winner.turns[0].tokens)
    assert blind.group.question.media == []
    assert blind.winner.policy_turns


def test_max_tokens_shortens_turns(generator: ActorHandle) -> None:
    async def short() -> Group:
        request = RolloutRequest(question(), "short", 2, SamplingParams(1.0, max_tokens=2), operations=False, max_turns=1)
        return await generator.rollout.remote(request)[0]

    group = asyncio.run(asyncio.wait_for(short(), 60))
    assert all(len(t.turns[-1].tokens) <= 2 for t in group.trajectories)
