"""Ended episodes are stored before anybody is told, and their group counts once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pixelis.actors import episode_outcomes, group_views
from pixelis.actors.episode_outcomes import EpisodeOutcomes, experience_id
from pixelis.actors.episodes import Line, OutsideEpisode
from pixelis.config import load
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import InfraFailure
from pixelis.memory import Entry
from pixelis.protocol.completion import Completion
from pixelis.records import ImageView, Media, Question, StopReason, Trajectory, Turn

PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAA"
    "AABJRU5ErkJggg=="
)


class Memory:
    """A memory that stores once it is ``open``, as a shard does after its restart."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.open = asyncio.Event()
        self.fails = 0

    async def add(self, entries: list[Entry]) -> None:
        await self.open.wait()
        if self.fails:
            self.fails -= 1
            raise InfraFailure("no space", code="no_space")
        self.entries |= {entry.experience.id: entry for entry in entries}

    async def size(self) -> int:
        return 1000


class Evolution:
    def __init__(self) -> None:
        self.tasks: list[Any] = []

    @property
    def submit(self) -> Any:
        async def remote(*arguments: Any) -> bool:
            self.tasks.append(arguments)
            return True

        return SimpleNamespace(remote=remote)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are futures of this process."""

    def put(value: Any) -> Any:
        reference: asyncio.Future[Any] = running.create_future()
        running.call_soon_threadsafe(reference.set_result, value)
        return reference

    monkeypatch.setattr(episode_outcomes.ray, "put", put)


running: asyncio.AbstractEventLoop


def run(test: Callable[[], Any]) -> None:
    async def main() -> None:
        global running
        running = asyncio.get_running_loop()
        await test()

    asyncio.run(main())


BRIEF = "memory.write_timeout_s=0.1"


def outcomes(*overrides: str) -> tuple[EpisodeOutcomes, Memory, Evolution]:
    memory, evolution = Memory(), Evolution()

    async def handle() -> Any:
        return evolution

    config = load(None, ["memory.write_timeout_s=60", *overrides])
    return EpisodeOutcomes(config, handle, memory), memory, evolution  # type: ignore[arg-type]


def played(number: int, answer: str) -> OutsideEpisode:
    """An open episode with one completion about a picture."""
    media = [Media(id="img0", uri=PNG)]
    question = Question(id=f"q{number}", question="Mail anna@example.org?", media=media, answers=["7"])
    trajectory = Trajectory(
        id=f"traj_{number}",
        question_id=f"q{number}",
        group_id="g",
        images=[ImageView(id="img0", source_size=(1, 1), view_size=(8, 8))],
        turns=[
            Turn(role="user", text=question.question, tokens=[1]),
            Turn(role="assistant", text=answer, tokens=[2], log_probs=[-0.1]),
        ],
        answer=answer,
        stop_reason=StopReason.ANSWER,
    )
    added: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    added.set_result({trajectory.id: [np.full((8, 8, 3), number, np.uint8)]})
    line = Line(
        question,
        trajectory,
        group_views.GroupViews(added),  # type: ignore[arg-type]
        turns={2: 1},
        completion=Completion(answer, "stop"),
    )
    return OutsideEpisode(
        f"ep_{number}", question, "g", SamplingParams(), 1e12, owner="0123456789abcdef.", lines={"main": line}
    )


def test_a_group_is_stored_redacted_with_pictures_and_learnt_once() -> None:
    async def test() -> None:
        result, memory, evolution = outcomes()
        memory.open.set()
        episodes = [played(number, answer) for number, answer in enumerate("7787")]
        for number, episode in enumerate(episodes):
            episode.end({"reward": float(number != 2)})
            await result.ended([episode], complete=False)
            assert experience_id(episode.id) in memory.entries
        for _ in range(2):  # the second is a repetition
            await result.ended(episodes)
            await result.drain(10)
        entry = memory.entries["exp_0"]
        experience = entry.experience
        assert "anna" not in experience.model_dump_json()
        assert (experience.question.answers, experience.user) == (None, "0123456789abcdef.")
        assert experience.trajectory.outcome == {"reward": 1.0}
        assert (experience.verdict.strategy, experience.verdict.reason) == ("reward", "rewarded")
        assert list(entry.pictures) == ["img0"]
        assert len({arguments[0].id for arguments in evolution.tasks}) == 1, "which Evolution takes once"
        task, views, _, question, originals, unclear = evolution.tasks[0]
        assert (task.user, task.pseudo_label, unclear) == ("0123456789abcdef.", "7", 0)
        assert set(await views.get()) == {t.id for t in task.trajectories}
        assert "anna" not in question.question
        assert originals is None, "three of four is too few for a question of the canary"
        assert len(memory.entries) == 4

    run(test)


@pytest.mark.parametrize("goes_on", [True, False])
def test_only_an_episode_that_its_client_left_alone_is_a_question_of_the_canary(goes_on: bool) -> None:
    async def test() -> None:
        result, memory, evolution = outcomes()
        memory.open.set()
        episodes = [played(number, "7") for number in range(4)]
        for number, episode in enumerate(episodes):
            if goes_on:
                episode.lines["main"].turns[4] = 2
            episode.end({"reward": float(number)})
        await result.ended(episodes)
        await result.drain(10)
        (originals,) = [arguments[4] for arguments in evolution.tasks]
        assert originals is None if goes_on else list(originals) == ["img0"]

    run(test)


def test_a_reward_is_not_acknowledged_before_it_is_on_disk_and_a_retry_waits_for_the_same_write() -> None:
    async def test() -> None:
        result, memory, evolution = outcomes(BRIEF)
        episodes = [played(number, answer) for number, answer in enumerate("78")]
        for number, episode in enumerate(episodes):
            episode.end({"reward": float(number)})
        with pytest.raises(InfraFailure, match="not stored"):
            await result.ended(episodes)
        memory.open.set()
        async with asyncio.timeout(60):
            while len(memory.entries) < 2:
                await asyncio.sleep(0.01)
        await result.ended(episodes)
        await result.drain(10)
        assert (len(memory.entries), len(evolution.tasks), result.counts["remembered"]) == (2, 1, 2)

    run(test)


def test_a_full_disk_is_tried_again_and_nothing_is_learnt_before() -> None:
    async def test() -> None:
        result, memory, evolution = outcomes()
        memory.open.set()
        memory.fails = 1
        episodes = [played(number, answer) for number, answer in enumerate("78")]
        for number, episode in enumerate(episodes):
            episode.end({"reward": float(number)})
        with pytest.raises(InfraFailure, match="not stored"):
            await result.ended(episodes)
        assert not evolution.tasks
        await result.ended(episodes)
        await result.drain(10)
        assert (len(memory.entries), len(evolution.tasks)) == (2, 1)

    run(test)


def test_groups_that_teach_nothing_are_counted_by_cause() -> None:
    async def test() -> None:
        result, memory, evolution = outcomes("evolution.cold_start=0")
        memory.open.set()
        for first, answers, rewards in ((0, "77", [1, 1]), (10, "789", [None] * 3), (20, "7", [1])):
            episodes = [played(first + i, answer) for i, answer in enumerate(answers)]
            for episode, reward in zip(episodes, rewards, strict=True):
                episode.end(None if reward is None else {"reward": float(reward)})
            await result.ended(episodes)
        silent = OutsideEpisode("ep_silent", Question(id="q", question=""), "g", SamplingParams(), 1e12)
        silent.end(cause="agent_failed")
        await result.ended([silent])
        await result.drain(10)
        counts = {name: n for name, n in result.counts.items() if name.startswith(("episodes_", "groups_"))}
        expected = {"groups_equal_rewards": 1, "groups_tie": 1, "groups_few_rewards": 1}
        assert counts == {"episodes_rewarded": 3, "episodes_unrewarded": 3, **expected}
        assert not evolution.tasks
        assert result.learns
        assert result.unclear == {"0123456789abcdef.": 1}

    run(test)
