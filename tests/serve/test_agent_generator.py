"""A real Generator on nano: episodes streamed turn by turn, and cancelled episodes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from clips import encode, footage
from PIL import Image
from ray.actor import ActorHandle
from scripted import picture_url

from pixelis.actors.episode_tools import BoundTools
from pixelis.actors.generator import Generator
from pixelis.actors.generator_router import RolloutRequest
from pixelis.actors.policy_store import PolicyStore
from pixelis.actors.toolbox_pool import ToolboxPool
from pixelis.config import load
from pixelis.datasets.cards import VIEW_MULTIPLE
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import BadImage
from pixelis.records import Action, Exchange, Group, Media, Observation, Question
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import AgentQuery, Answer, Backends

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


def agent(*overrides: str) -> Agent:
    return Agent(load(None, [*OVERRIDES, *overrides]), Backends(("streaming-generator",), "pixelis"))


def test_a_streamed_group_equals_its_events(generator: ActorHandle) -> None:
    request = RolloutRequest(question(), "g", 3, SamplingParams(1.0, seed=5), max_turns=3, text=True)

    async def listen() -> list[Any]:
        return [await ref async for ref in generator.stream.remote(request)]

    *together, group, added, (picture,) = asyncio.run(asyncio.wait_for(listen(), 60))
    sent, views = [*chain(*together)], {id: [picture, *own] for id, own in added.items()}
    written = "".join(text for _, text in (event for event in sent if len(event) == 2))
    events = [event for event in sent if len(event) == 3]
    assert written == "".join(turn.text for turn in group.trajectories[0].turns if turn.is_policy)
    assert set(views) == {t.id for t in group.trajectories}
    for sample, trajectory in enumerate(group.trajectories):
        streamed = [(turn, added) for s, turn, added in events if s == sample]
        recorded = [turn for turn in trajectory.turns if turn.role in ("assistant", "tool")]
        assert [t.text for t, _ in streamed] == [t.text for t in recorded]
        assert [t.role for t, _ in streamed] == [t.role for t in recorded]
        assert all(not t.tokens and not t.log_probs for t, _ in streamed)
        assert sum(len(added) for _, added in streamed) == len(views[trajectory.id]) - 1
        assert all(turn.tokens for turn in trajectory.turns)
    last = group.trajectories[0].turns[-1]
    (pieces,) = ray.get(generator.pieces.remote([last.tokens]), timeout=60)
    assert b"".join(pieces).decode().removesuffix("<|im_end|>") == last.text
    assert len(pieces) == len(last.log_probs)


def test_samples_see_the_pictures_in_turn_as_corrected(generator: ActorHandle) -> None:
    """The views of the group are those without a correction, whatever the policy saw."""

    file = io.BytesIO()
    warm = np.random.default_rng(3).integers(40, 200, (64, 64, 3)) * (1.0, 0.7, 0.4)
    Image.fromarray(warm.astype(np.uint8)).save(file, "PNG")
    media = [Media(id="img0", uri="data:image/png;base64," + base64.b64encode(file.getvalue()).decode())]

    def ask(*augmentations: str) -> tuple[Group, list[Any]]:
        asked = Question(id="q", question="How many shapes are there?", media=media)
        request = RolloutRequest(
            asked, "lights", 4, SamplingParams(0.0), max_turns=1, augmentations=augmentations
        )
        group, _, first = ray.get(generator.rollout.options(num_returns=3).remote(request), timeout=60)
        return group, first

    plain, expected = ask()
    group, first = ask("grey_world", "autocontrast")
    assert [t.augmentation for t in group.trajectories] == [None, "grey_world", "autocontrast", None]
    assert [t.augmentation for t in plain.trajectories] == [None] * 4
    assert all((a == b).all() for a, b in zip(first, expected, strict=True))
    log_probs = [t.turns[-1].log_probs for t in group.trajectories]
    assert log_probs[0] == pytest.approx(plain.trajectories[0].turns[-1].log_probs, abs=1e-4)
    assert log_probs[0] == pytest.approx(log_probs[3], abs=1e-4)
    assert all(log_probs[0] != pytest.approx(other, abs=1e-4) for other in log_probs[1:3])


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.long), True])
def test_cancelled_episodes_leave_no_session(generator: ActorHandle, stream: bool) -> None:
    """An open session would delay the next version forever."""

    async def leave() -> None:
        own, picture = agent(), picture_url((64, 64))
        query = AgentQuery("How many shapes are there?", [picture], 8, SamplingParams(1.0), max_turns=3)
        with contextlib.suppress(TimeoutError):  # a fast machine may finish the first one
            for seconds in (0.02, 0.05, 0.1):
                if stream:
                    async with asyncio.timeout(5), contextlib.aclosing(own.stream(query)) as items:
                        await anext(items)
                else:
                    await asyncio.wait_for(own.answer(query), seconds)
        async with asyncio.timeout(60):
            while (health := await generator.health.remote())["sessions"] or health["pending"]:
                await asyncio.sleep(0.05)
        assert await generator.load.remote(0) == 0
        assert isinstance(await own.answer(query), Answer)

    asyncio.run(asyncio.wait_for(leave(), 120))


def test_conversations_and_questions_without_pictures_are_answered(generator: ActorHandle) -> None:
    history = [Exchange(question="Is there a red frame?", answer="yes", media=["img0"])]
    sampling, picture = SamplingParams(1.0, seed=1), picture_url((64, 64))

    async def ask() -> list[Answer]:
        asked: Any = {"question": "Which digit is in it?", "samples": 2, "sampling": sampling, "max_turns": 2}
        queries = [
            AgentQuery(images=[picture, picture], history=history, **asked),
            AgentQuery(images=[picture], **asked),
            AgentQuery(images=[], operations=False, **asked),
        ]
        return [await agent().answer(query) for query in queries]

    second, alone, blind = asyncio.run(asyncio.wait_for(ask(), 60))
    turns = second.winner.turns
    assert [turn.images for turn in turns[:2]] == [["img0"], ["img1"]]
    assert "<answer>yes</answer>" in turns[0].text
    assert sum(len(turn.tokens) for turn in turns[:2]) > len(alone.winner.turns[0].tokens)
    assert blind.group.question.media == []
    assert blind.winner.policy_turns


@pytest.mark.long
def test_a_clip_is_seen_in_frames_and_read_by_the_operations(generator: ActorHandle) -> None:
    clip = encode(footage(count=24))
    url = "data:video/mp4;base64," + base64.b64encode(clip).decode()

    async def ask() -> tuple[Answer, tuple[Observation, list[Any]]]:
        own, config = agent(), load(None, OVERRIDES)
        query = AgentQuery("What moves?", [], 2, SamplingParams(1.0, seed=1), max_turns=2, clips=[url])
        query, size = await own.measure(query)
        assert query.clips == [clip], "its URL would be decoded again for the frames"
        assert 3 * 160 * 96 * config.dialogue.frames < size < 10_000_000
        pictures = await own.decode(query)
        answer = await own.answer(query, pictures)
        pool = ToolboxPool(config, VIEW_MULTIPLE, "thousand")
        try:
            opened, (images, _) = await pool.open(pictures.media, pictures.full)
            action = Action(op="select_frames", target="vid0", arguments={"frames": [3, 20]})
            return answer, await BoundTools(pool, opened).execute(action, images, {})
        finally:
            pool.close()

    answer, (observation, views) = asyncio.run(asyncio.wait_for(ask(), 90))
    frames = [image for image in answer.winner.images if image.parent == "vid0"]
    assert [frame.id for frame in frames[:2]] == ["vid0.0", "vid0.1"]
    assert answer.group.question.media[0].kind == "video"
    assert answer.group.question.media[0].uri.startswith("sha256:")
    assert (observation.status, len(views)) == ("ok", 2), observation.text


def test_long_clips_are_refused(ray_cluster: None) -> None:
    url = "data:video/mp4;base64," + base64.b64encode(encode(footage(count=30))).decode()
    query = AgentQuery("What moves?", [], 2, SamplingParams(1.0), clips=[url])
    with pytest.raises(BadImage) as caught:
        asyncio.run(agent("serve.max_video_seconds=1").decode(query))
    assert caught.value.code == "video_too_long"


@pytest.mark.long
def test_max_tokens_shortens_turns(generator: ActorHandle) -> None:
    async def short() -> Group:
        sampling = SamplingParams(1.0, max_tokens=2)
        request = RolloutRequest(question(), "short", 2, sampling, operations=False, max_turns=1, views=False)
        return await generator.rollout.remote(request)[0]

    group = asyncio.run(asyncio.wait_for(short(), 60))
    assert all(len(t.turns[-1].tokens) <= 2 for t in group.trajectories)
