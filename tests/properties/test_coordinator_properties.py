"""The Coordinator's own rules under any timing: bounded staleness, whole groups, questions once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_coordinator import REAL, Generator, Method, Scorer, on_loop, settings_of

from pixelis.actors import report
from pixelis.actors.coordinator import RolloutBatch, StepResult
from pixelis.config import Config
from pixelis.datasets.questions import read_questions
from pixelis.errors import BadInput, DataFailure, InfraFailure, PixelisError
from pixelis.records import Group, Question
from pixelis.rewards.grader import Advance
from pixelis.telemetry import events


def generator(seed: int = 1) -> Generator:
    return Generator(random.Random(seed))


async def learn(
    coordinator: Any, config: Config, world: int, chance: random.Random
) -> list[list[RolloutBatch]]:
    """A learner of ``world`` ranks that publishes version 10 + step after each batch."""
    taken = []
    await coordinator.begin(0, {}, 10)
    for step in range(config.rft.steps):
        shares = await asyncio.gather(*(coordinator.next_batch(rank, world, step) for rank in range(world)))
        taken.append(shares)
        await asyncio.sleep(chance.random() * 0.004)
        await coordinator.step_done(step, 11 + step)
    assert await coordinator.next_batch(0, world, config.rft.steps) is None
    return taken


def asked(config: Config, count: int) -> list[str]:
    """The first questions of the source, in its order."""
    source = read_questions(config.data.train, seed=config.run.seed)
    return [next(source).id for _ in range(count)]


@settings(max_examples=40, deadline=None)
@given(
    questions=st.integers(1, 4),
    group=st.integers(2, 4),
    staleness=st.integers(0, 3),
    steps=st.integers(1, 6),
    world=st.integers(1, 3),
    generators=st.integers(1, 3),
    deaths=st.sampled_from([0.0, 0.0, 0.15]),
    refused=st.sampled_from([0.0, 0.0, 0.1]),
    seed=st.integers(0, 10**6),
)
@on_loop
async def test_any_timing_gives_whole_groups_once_and_no_staler_than_allowed(
    questions: int, group: int, staleness: int, steps: int, world: int, generators: int,
    deaths: float, refused: float, seed: int,
) -> None:  # fmt: skip
    chance = random.Random(seed)
    rft = {"group_size": group, "max_off_policy_steps": staleness, "steps": steps}
    config = settings_of(prompts_per_step=questions * world, **rft)
    members = [Generator(chance, deaths, refused) for _ in range(generators)]
    taken = await learn(REAL(config, members, [Scorer()]), config, world, chance)
    used: Counter[str] = Counter()
    for step, shares in enumerate(taken):
        assert [len(share.groups) for share in shares] == [questions] * world
        assert {share.step for share in shares} == {step}
        for one in (g for share in shares for g in share.groups):
            used[one.question.id] += 1
            assert len(one.trajectories) == group
            assert sum(t.advantage for t in one.trajectories) == pytest.approx(0, abs=1e-4)
            assert 10 + step - staleness <= one.policy_version <= 10 + step
    assert set(used.values()) == {1}, "no question twice"
    end = taken[-1][-1].state["questions"]
    first = asked(config, max([end["cursor"] - 1, *end["ahead"]]) + 1)
    consumed = set(first[: end["cursor"]]) | {first[number] for number in end["ahead"]}
    assert set(used) <= consumed
    stale = sum(shares[0].metrics["rollout/stale_groups"] for shares in taken)
    assert stale == 0 or staleness > 0
    late = [name for name in consumed - set(used) if random.Random(name).random() >= refused]
    assert len(late) == stale, "only refused questions are left out, and those whose groups came too late"


@settings(max_examples=15, deadline=None)
@given(staleness=st.integers(0, 3), bad=st.integers(0, 4), seed=st.integers(0, 1000))
@on_loop
async def test_an_error_in_any_batch_reaches_the_learner_and_never_leaves_it_waiting(
    staleness: int, bad: int, seed: int
) -> None:
    chance = random.Random(seed)
    config = settings_of(prompts_per_step=2, group_size=2, max_off_policy_steps=staleness, steps=5)

    class Breaks(Generator):
        async def _group(self, question: Question, group_id: str, n: int) -> Group:
            if group_id.startswith(f"s{bad:06d}"):
                raise KeyError("a bug in a generator")
            return await super()._group(question, group_id, n)

    coordinator = REAL(config, [Breaks(chance), Breaks(chance)], [Scorer()])
    with pytest.raises(PixelisError, match="a bug in a generator"):
        await learn(coordinator, config, 1, chance)


@settings(max_examples=15, deadline=None)
@given(at=st.integers(0, 3), staleness=st.integers(0, 2), seed=st.integers(0, 1000))
@on_loop
async def test_a_learner_that_comes_back_goes_on_with_the_questions_after_its_checkpoint(
    at: int, staleness: int, seed: int
) -> None:
    """Steps are learnt up to ``at``, the learner dies and begins again there."""
    chance = random.Random(seed)
    config = settings_of(prompts_per_step=3, group_size=2, max_off_policy_steps=staleness, steps=5)
    coordinator = REAL(config, [Generator(chance), Generator(chance)], [Scorer()])
    await coordinator.begin(0, {}, 10)
    stale, used, state = 0.0, list[str](), dict[str, Any]()
    for step in range(5):
        if step == at:  # what was in flight or not handed out is given up
            await asyncio.sleep(chance.random() * 0.01)
            await coordinator.begin(step, state, 10 + step)
        batch = await coordinator.next_batch(0, 1, step)
        used += sorted(g.question.id for g in batch.groups)
        stale += batch.metrics["rollout/stale_groups"]
        state = batch.state
        await coordinator.step_done(step, 11 + step)
    assert set(Counter(used).values()) == {1}
    assert len(used) == 15
    if staleness == 0:
        assert stale == 0
        assert set(used) == set(asked(config, 15))
    else:  # those in flight at the end may be of lower numbers than the last that were used
        assert set(used) <= set(asked(config, 15 + int(stale) + 3 * staleness))


@on_loop
async def test_a_batch_of_the_production_before_is_not_handed_out() -> None:
    config, one = settings_of(prompts_per_step=2, group_size=2, steps=3), generator()
    coordinator = REAL(config, [one], [Scorer()])
    await coordinator.begin(0, {}, 10)
    await asyncio.sleep(0)
    async with coordinator.changed:  # which the batch that is done meanwhile waits for
        while one.done.total() < config.rft.prompts_per_step:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
    await coordinator.begin(0, {}, 20)
    batch = await coordinator.next_batch(0, 1, 0)
    assert {group.policy_version for group in batch.groups} == {20}


@on_loop
async def test_a_stop_ends_the_wait_of_every_rank_but_not_half_a_batch() -> None:
    coordinator = REAL(settings_of(prompts_per_step=2, group_size=2, steps=3), [generator()], [Scorer()])
    await coordinator.begin(0, {}, 10)
    first = await coordinator.next_batch(0, 2, 0)
    await coordinator.stop()
    second = await coordinator.next_batch(1, 2, 0)
    assert first is not None
    assert second is not None, "one rank has its share, so the other gets its own: the step needs both"
    await coordinator.step_done(0, 11)
    assert await coordinator.next_batch(0, 2, 1) is None


@on_loop
async def test_a_straggler_delays_only_itself_and_is_dropped_by_name_when_it_comes_too_late(
    tmp_path: Path,
) -> None:
    own = {"run": {"dir": str(tmp_path)}}
    config = settings_of(own, prompts_per_step=2, group_size=2, max_off_policy_steps=1, steps=6)
    released, slow = asyncio.Event(), list[str]()

    class Slow(Generator):
        async def _group(self, question: Question, group_id: str, n: int) -> Group:
            version = self.version
            if not slow:
                slow.append(question.id)
                await released.wait()
            group = await super()._group(question, group_id, n)
            return group.model_copy(update={"policy_version": version}) if question.id in slow else group

    coordinator = REAL(config, [Slow(random.Random(1))], [Scorer()])
    await coordinator.begin(0, {}, 10)
    taken = []
    for step in range(6):
        if step == 4:
            released.set()
        taken.append(await coordinator.next_batch(0, 1, step))
        await coordinator.step_done(step, 11 + step)
    assert all(len(batch.groups) == 2 for batch in taken)
    assert slow[0] not in [g.question.id for batch in taken for g in batch.groups]
    assert sum(batch.metrics["rollout/stale_groups"] for batch in taken) == 1
    (dropped,) = events.read(tmp_path, "stale_group")
    assert dropped["id"] == slow[0]
    assert dropped["age"] > 1


@on_loop
async def test_a_coordinator_that_starts_again_goes_on_with_the_questions_after_the_last_batch() -> None:
    config, one = settings_of(prompts_per_step=2, group_size=2, steps=4), generator()
    coordinator = REAL(config, [one], [Scorer()])
    incarnation, state, used = await coordinator.begin(0, {}, 10), dict[str, Any](), list[str]()
    for step in range(4):
        if step == 2:
            coordinator = REAL(config, [one], [Scorer()])  # as Ray starts a dead actor again
            with pytest.raises(InfraFailure, match="has restarted"):
                await coordinator.next_batch(0, 1, step, incarnation)
            await coordinator.step_done(step - 1, 99, incarnation)  # a call from before changes nothing
            assert coordinator.step_of_version == {}
            incarnation = await coordinator.begin(step, state, 10 + step, resumes_rewards=False)
        batch = await coordinator.next_batch(0, 1, step, incarnation)
        repeated = await coordinator.next_batch(0, 1, step, incarnation)
        assert repeated == batch, "a call that Ray repeats gets the same"
        used += [g.question.id for g in batch.groups]
        state = batch.state
        await coordinator.step_done(step, 11 + step, incarnation)
    assert used == asked(config, 8)


# -- evaluation ----------------------------------------------------------------------------------------------


def held_out(folder: Path) -> str:
    rows = "".join(f'{{"id": "h{i}", "question": "What?", "answers": ["7"]}}\n' for i in range(4))
    (folder / "held_out.jsonl").write_text(rows)
    return str(folder / "held_out.jsonl")


@on_loop
async def test_an_evaluation_beside_training_is_of_its_own_version_and_never_waited_for(
    tmp_path: Path,
) -> None:
    own = {"data": {"evaluate": held_out(tmp_path)}, "run": {"dir": str(tmp_path)}}
    own |= {"telemetry": {"trajectories": 0}, "evaluate": {"samples": 3, "seeds": [8, 9]}}
    rft = {"max_off_policy_steps": 1, "steps": 5, "evaluate_every": 2}
    config = settings_of(own, prompts_per_step=2, group_size=2, **rft)
    answered, released = list[tuple[str, int, int]](), asyncio.Event()

    class Watched(Generator):
        async def _group(self, question: Question, group_id: str, n: int) -> Group:
            if group_id.startswith("evaluate"):
                await released.wait()
                answered.append((question.id, self.version, n))
            return await super()._group(question, group_id, n)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "merge_views", lambda views: views[0])
        coordinator = REAL(config, [Watched(random.Random(seed)) for seed in (1, 2)], [Scorer()])
        await coordinator.begin(0, {}, 10)
        for step in range(4):  # the evaluation after step 2 stands still all the while
            await coordinator.next_batch(0, 1, step)
            await coordinator.step_done(step, 11 + step)
        assert answered == []
        released.set()
        last = await coordinator.finish()
    assert [version for _, version, _ in answered] == [12] * 8 + [14] * 8  # each question with both seeds
    assert {samples for _, _, samples in answered} == {3}
    rows = events.read(tmp_path, "evaluation")
    assert [(row["step"], row["version"]) for row in rows] == [(2, 12), (4, 14)]
    assert last["evaluate/step"] == 4
    assert last["evaluate/accuracy"] == rows[-1]["evaluate/accuracy"] == 1.0


@on_loop
async def test_pictures_that_nobody_asked_about_are_not_evaluated(tmp_path: Path) -> None:
    rows = '{"id": "a", "question": "What?", "answers": ["7"]}\n{"id": "b", "question": ""}\n'
    (tmp_path / "rows.jsonl").write_text(rows)
    source = str(tmp_path / "rows.jsonl")
    coordinator = REAL(settings_of(), [generator()], [Scorer()])
    groups, _ = await coordinator.evaluate(source, 1, 10, operations=True)
    assert [group.question.id for group in groups] == ["a"]
    with pytest.raises(BadInput, match="b has no question text"):
        await coordinator.evaluate(source, 2, 10, operations=True)


@on_loop
async def test_an_evaluation_that_fails_ends_its_other_questions(tmp_path: Path) -> None:
    class Fails(Generator):
        async def _group(self, question: Question, group_id: str, n: int) -> Group:
            if question.id != "h2":
                await asyncio.Future()
            raise DataFailure("not this one")

    coordinator = REAL(settings_of(), [Fails(random.Random(1))], [Scorer()])
    with pytest.raises(DataFailure, match="not this one"):
        await coordinator.evaluate(held_out(tmp_path), 0, 10, operations=True)
    await asyncio.sleep(0.01)
    assert coordinator.router.members[0].running == 0


# -- calls of a learner that died change nothing for the next one --------------------------------------------


async def numbers_of(coordinator: Any, steps: range, incarnation: int) -> list[int]:
    """Numbers of the questions of some batches, which are learnt."""
    numbers = []
    for step in steps:
        numbers += (await coordinator.next_batch(0, 1, step, incarnation)).numbers
        await coordinator.step_done(step, 21 + step, incarnation)
    return numbers


@on_loop
async def test_a_batch_that_a_dead_learner_waited_for_takes_no_group_from_the_next_learner() -> None:
    config = settings_of(prompts_per_step=3, group_size=2, steps=4)
    coordinator = REAL(config, [generator(1), generator(2)], [Scorer()])
    first = await coordinator.begin(0, {}, 10)
    await numbers_of(coordinator, range(2), first)
    waiting = asyncio.ensure_future(coordinator.next_batch(0, 1, 2, first))
    await asyncio.sleep(0)
    second = await coordinator.begin(1, {"questions": {"cursor": 3}}, 21)
    with pytest.raises(InfraFailure, match="has restarted"):
        await waiting
    assert await numbers_of(coordinator, range(1, 4), second) == list(range(3, 12))


@dataclass
class Locked(Generator):
    """Loads a version when the test allows it."""

    may_load: asyncio.Event = field(default_factory=asyncio.Event)

    async def _load(self, version: int) -> int:
        await self.may_load.wait()
        return await super()._load(version)


@on_loop
async def test_a_learner_that_begins_while_another_does_has_the_only_producer() -> None:
    locked = Locked(random.Random(1))
    coordinator = REAL(settings_of(prompts_per_step=4, group_size=2, steps=3), [locked], [Scorer()])
    dead = asyncio.ensure_future(coordinator.begin(0, {}, 10))
    await asyncio.sleep(0.01)
    second = asyncio.ensure_future(coordinator.begin(0, {}, 10))
    await asyncio.sleep(0.01)
    locked.may_load.set()
    with pytest.raises(InfraFailure, match="has restarted"):
        await dead
    assert await numbers_of(coordinator, range(3), await second) == list(range(12))


@on_loop
async def test_a_step_of_a_dead_learner_does_not_advance_the_rewards_that_the_next_one_resumed() -> None:
    calls = list[Any]()

    class Recorded(Scorer):
        async def _load(self, state: bytes | None) -> None:
            calls.append("load")

        async def _advance(self, step: int, is_last: bool = False) -> Advance:
            calls.append(step)
            return Advance()

    coordinator = REAL(settings_of(prompts_per_step=2, group_size=2, steps=30), [generator()], [Recorded()])
    dead = await coordinator.begin(14, {}, 14)
    await coordinator.next_batch(0, 1, 14, dead)
    async with coordinator.router.reserve(14):  # an evaluation has the only generator
        old = asyncio.ensure_future(coordinator.step_done(14, 15, dead))
        await asyncio.sleep(0.01)
        new = asyncio.ensure_future(coordinator.begin(10, {}, 10))
        await asyncio.sleep(0.01)
    await numbers_of(coordinator, range(10, 11), await new)
    assert await old == StepResult()
    assert calls == ["load", "load", 10]


class Sleeper(Generator):
    """Shares its GPU with a learner."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asleep, self.sleep, self.wake = False, Method(self._sleep), Method(self._wake)

    async def _sleep(self) -> None:
        await asyncio.sleep(0.02)
        self.asleep = True

    async def _wake(self) -> None:
        self.asleep = False


@on_loop
async def test_generators_that_go_to_sleep_for_a_dead_learner_are_awake_for_the_next_one() -> None:
    config, sleeper = settings_of(prompts_per_step=2, group_size=2, steps=3), Sleeper(random.Random(1))
    engine = config.engine.model_copy(update={"colocate": True})
    coordinator = REAL(config.model_copy(update={"engine": engine}), [sleeper], [Scorer()])
    dead = asyncio.ensure_future(coordinator.next_batch(0, 1, 0, await coordinator.begin(0, {}, 10)))
    while coordinator.router.awake.is_set():
        await asyncio.sleep(0.001)
    incarnation = await coordinator.begin(0, {}, 10)
    await dead
    assert not sleeper.asleep
    for step in range(3):
        await coordinator.next_batch(0, 1, step, incarnation)
        assert sleeper.asleep
        await coordinator.step_done(step, 11 + step, incarnation)
