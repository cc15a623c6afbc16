"""The Coordinator's own rules under any timing: bounded staleness, whole groups, questions once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError
from scripted_coordinator import REAL, Generator, Scorer, settings_of, without_ray

from pixelis.actors import report
from pixelis.actors.coordinator import RolloutBatch
from pixelis.actors.generator_router import GeneratorRouter, RolloutRequest, RouterTimeouts
from pixelis.config import Config
from pixelis.datasets.questions import read_questions
from pixelis.errors import BadInput, DataFailure, InfraFailure, PixelisError
from pixelis.records import Group, Question
from pixelis.telemetry import events


@pytest.fixture(scope="module", autouse=True)
def scripted() -> Iterator[None]:
    with without_ray():
        yield


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
def test_any_timing_gives_whole_groups_once_and_no_staler_than_allowed(
    questions: int,
    group: int,
    staleness: int,
    steps: int,
    world: int,
    generators: int,
    deaths: float,
    refused: float,
    seed: int,
) -> None:
    chance = random.Random(seed)
    config = settings_of(
        prompts_per_step=questions * world, group_size=group, max_off_policy_steps=staleness, steps=steps
    )
    members = [Generator(chance, deaths, refused) for _ in range(generators)]

    async def run() -> list[list[RolloutBatch]]:
        coordinator = REAL(config, members, [Scorer()])
        return await asyncio.wait_for(learn(coordinator, config, world, chance), 60)

    taken = asyncio.run(run())
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
    source = read_questions(config.data.train, seed=config.run.seed)
    end = taken[-1][-1].state["questions"]
    first = [next(source).id for _ in range(max([end["cursor"] - 1, *end["ahead"]]) + 1)]
    assert set(used) <= set(first)
    consumed = set(first[: end["cursor"]]) | {first[number] for number in end["ahead"]}
    left_out = consumed - set(used)
    assert set(used) <= consumed
    stale = sum(shares[0].metrics["rollout/stale_groups"] for shares in taken)
    assert stale == 0 or staleness > 0
    late = [name for name in left_out if random.Random(name).random() >= refused]
    assert len(late) == stale, "only refused questions are left out, and those whose groups came too late"


@settings(max_examples=15, deadline=None)
@given(staleness=st.integers(0, 3), bad=st.integers(0, 4), seed=st.integers(0, 1000))
def test_an_error_in_any_batch_reaches_the_learner_and_never_leaves_it_waiting(
    staleness: int, bad: int, seed: int
) -> None:
    chance = random.Random(seed)
    config = settings_of(prompts_per_step=2, group_size=2, max_off_policy_steps=staleness, steps=5)

    class Breaks(Generator):
        async def _group(self, question: Question, group_id: str, n: int) -> Group:
            if group_id.startswith(f"s{bad:06d}"):
                raise KeyError("a bug in a generator")
            return await super()._group(question, group_id, n)

    async def run() -> None:
        coordinator = REAL(config, [Breaks(chance), Breaks(chance)], [Scorer()])
        await asyncio.wait_for(learn(coordinator, config, 1, chance), 60)

    with pytest.raises(PixelisError, match="a bug in a generator"):
        asyncio.run(run())


@settings(max_examples=15, deadline=None)
@given(at=st.integers(0, 3), staleness=st.integers(0, 2), seed=st.integers(0, 1000))
def test_a_learner_that_comes_back_goes_on_with_the_questions_after_its_checkpoint(
    at: int, staleness: int, seed: int
) -> None:
    """Steps are learnt up to ``at``, the learner dies and begins again there."""
    chance = random.Random(seed)
    config = settings_of(prompts_per_step=3, group_size=2, max_off_policy_steps=staleness, steps=5)

    stale = 0.0

    async def run() -> list[str]:
        nonlocal stale
        coordinator = REAL(config, [Generator(chance), Generator(chance)], [Scorer()])
        await coordinator.begin(0, {}, 10)
        used, state = [], {}
        for step in range(5):
            if step == at:  # what was in flight or not handed out is given up
                await asyncio.sleep(chance.random() * 0.01)
                await coordinator.begin(step, state, 10 + step)
            batch = await asyncio.wait_for(coordinator.next_batch(0, 1, step), 60)
            used += sorted(g.question.id for g in batch.groups)
            stale += batch.metrics["rollout/stale_groups"]
            state = batch.state
            await coordinator.step_done(step, 11 + step)
        return used

    source, used = read_questions(config.data.train, seed=config.run.seed), asyncio.run(run())
    assert set(Counter(used).values()) == {1}
    assert len(used) == 15
    if staleness == 0:
        assert stale == 0
        assert set(used) == {next(source).id for _ in range(15)}
    else:  # those in flight at the end may be of lower numbers than the last that were used
        assert set(used) <= {next(source).id for _ in range(15 + int(stale) + 3 * staleness)}


def test_a_batch_of_the_production_before_is_not_handed_out() -> None:
    config = settings_of(prompts_per_step=2, group_size=2, steps=3)

    async def run() -> RolloutBatch | None:
        generator = Generator(random.Random(1))
        coordinator = REAL(config, [generator], [Scorer()])
        await coordinator.begin(0, {}, 10)
        await asyncio.sleep(0)
        async with coordinator.changed:  # which the batch that is done meanwhile waits for
            while generator.done.total() < config.rft.prompts_per_step:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
        await coordinator.begin(0, {}, 20)
        return await asyncio.wait_for(coordinator.next_batch(0, 1, 0), 10)

    batch = asyncio.run(run())
    assert {group.policy_version for group in batch.groups} == {20}


def test_a_stop_ends_the_wait_of_every_rank_but_not_half_a_batch() -> None:
    config = settings_of(prompts_per_step=2, group_size=2, steps=3)

    async def run() -> None:
        coordinator = REAL(config, [Generator(random.Random(1))], [Scorer()])
        await coordinator.begin(0, {}, 10)
        first = await coordinator.next_batch(0, 2, 0)
        await coordinator.stop()
        second = await asyncio.wait_for(coordinator.next_batch(1, 2, 0), 10)
        assert first is not None
        assert second is not None, (
            "one rank has its share, so the other gets its own: the optimizer step needs both"
        )
        await coordinator.step_done(0, 11)
        assert await asyncio.wait_for(coordinator.next_batch(0, 2, 1), 10) is None

    asyncio.run(run())


def test_a_straggler_delays_only_itself_and_is_dropped_by_name_when_it_comes_too_late(tmp_path: Path) -> None:
    config = settings_of(prompts_per_step=2, group_size=2, max_off_policy_steps=1, steps=6)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(tmp_path)})})
    released = asyncio.Event()
    slow: list[str] = []

    class Slow(Generator):
        async def _group(self, question: Question, group_id: str, n: int) -> Group:
            version = self.version
            if not slow:
                slow.append(question.id)
                await released.wait()
            group = await super()._group(question, group_id, n)
            return group.model_copy(update={"policy_version": version}) if question.id in slow else group

    async def run() -> list[RolloutBatch]:
        coordinator = REAL(config, [Slow(random.Random(1))], [Scorer()])
        await coordinator.begin(0, {}, 10)
        taken = []
        for step in range(6):
            if step == 4:
                released.set()
            taken.append(await asyncio.wait_for(coordinator.next_batch(0, 1, step), 10))
            await coordinator.step_done(step, 11 + step)
        return taken

    taken = asyncio.run(run())
    assert all(len(batch.groups) == 2 for batch in taken)
    assert slow[0] not in [g.question.id for batch in taken for g in batch.groups]
    assert sum(batch.metrics["rollout/stale_groups"] for batch in taken) == 1
    (dropped,) = events.read(tmp_path, "stale_group")
    assert dropped["id"] == slow[0]
    assert dropped["age"] > 1


def test_a_coordinator_that_starts_again_goes_on_with_the_questions_after_the_last_batch() -> None:
    config = settings_of(prompts_per_step=2, group_size=2, steps=4)

    async def run() -> list[str]:
        generator, used = Generator(random.Random(1)), []
        coordinator = REAL(config, [generator], [Scorer()])
        incarnation, state = await coordinator.begin(0, {}, 10), {}
        for step in range(4):
            if step == 2:
                coordinator = REAL(config, [generator], [Scorer()])  # as Ray starts a dead actor again
                with pytest.raises(InfraFailure, match="has restarted"):
                    await coordinator.next_batch(0, 1, step, incarnation)
                await coordinator.step_done(step - 1, 99, incarnation)  # a call from before changes nothing
                assert coordinator.step_of_version == {}
                incarnation = await coordinator.begin(step, state, 10 + step, resumes_rewards=False)
            batch = await asyncio.wait_for(coordinator.next_batch(0, 1, step, incarnation), 10)
            assert await coordinator.next_batch(0, 1, step, incarnation) == batch, (
                "a call that Ray repeats gets the same"
            )
            used += [g.question.id for g in batch.groups]
            state = batch.state
            await coordinator.step_done(step, 11 + step, incarnation)
        return used

    source = read_questions(config.data.train, seed=config.run.seed)
    assert asyncio.run(run()) == [next(source).id for _ in range(8)]


def test_an_evaluation_beside_training_is_of_its_own_version_and_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "merge_views", lambda views: views[0])
    held_out = "".join(f'{{"id": "h{i}", "question": "What?", "answers": ["7"]}}\n' for i in range(4))
    (tmp_path / "held_out.jsonl").write_text(held_out)
    config = settings_of(prompts_per_step=2, group_size=2, max_off_policy_steps=1, steps=5, evaluate_every=2)
    data = config.data.model_copy(update={"evaluate": str(tmp_path / "held_out.jsonl")})
    telemetry = config.telemetry.model_copy(update={"trajectories": 0})
    run_ = config.run.model_copy(update={"dir": str(tmp_path)})
    evaluate = config.evaluate.model_copy(update={"samples": 3, "seeds": [8, 9]})
    config = config.model_copy(
        update={"data": data, "run": run_, "telemetry": telemetry, "evaluate": evaluate}
    )
    answered: list[tuple[str, int, int]] = []
    released = asyncio.Event()

    class Watched(Generator):
        async def _group(self, question: Question, group_id: str, n: int) -> Group:
            if group_id.startswith("evaluate"):
                await released.wait()
                answered.append((question.id, self.version, n))
            return await super()._group(question, group_id, n)

    async def run() -> dict[str, float]:
        coordinator = REAL(config, [Watched(random.Random(1)), Watched(random.Random(2))], [Scorer()])
        await coordinator.begin(0, {}, 10)
        for step in range(4):  # the evaluation after step 2 stands still all the while
            await asyncio.wait_for(coordinator.next_batch(0, 1, step), 10)
            await asyncio.wait_for(coordinator.step_done(step, 11 + step), 10)
        assert answered == []
        released.set()
        return await asyncio.wait_for(coordinator.finish(), 10)

    last = asyncio.run(run())
    assert [version for _, version, _ in answered] == [12] * 8 + [14] * 8  # each question with both seeds
    assert {samples for _, _, samples in answered} == {3}
    rows = events.read(tmp_path, "evaluation")
    assert [(row["step"], row["version"]) for row in rows] == [(2, 12), (4, 14)]
    assert last["evaluate/step"] == 4
    assert last["evaluate/accuracy"] == rows[-1]["evaluate/accuracy"] == 1.0


def test_pictures_that_nobody_asked_about_are_not_evaluated(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"id": "a", "question": "What?", "answers": ["7"]}\n{"id": "b", "question": ""}\n'
    )

    async def run(count: int) -> Any:
        coordinator = REAL(settings_of(), [Generator(random.Random(1))], [Scorer()])
        return await coordinator.evaluate(str(tmp_path / "rows.jsonl"), count, 10, operations=True)

    groups, _ = asyncio.run(run(1))
    assert [group.question.id for group in groups] == ["a"]
    with pytest.raises(BadInput, match="b has no question text"):
        asyncio.run(run(2))


def test_an_evaluation_that_fails_ends_its_other_questions(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"id": "h{i}", "question": "?", "answers": ["7"]}}\n' for i in range(4))
    )

    class Fails(Generator):
        async def _group(self, question: Question, group_id: str, n: int) -> Group:
            if question.id != "h2":
                await asyncio.Future()
            raise DataFailure("not this one")

    async def run() -> None:
        coordinator = REAL(settings_of(), [Fails(random.Random(1))], [Scorer()])
        with pytest.raises(DataFailure, match="not this one"):
            await coordinator.evaluate(str(tmp_path / "rows.jsonl"), 0, 10, operations=True)
        await asyncio.sleep(0.01)
        assert coordinator.router.members[0].running == 0

    asyncio.run(run())


def test_without_a_generator_the_wait_has_an_end() -> None:
    class Dead(Generator):
        async def _load(self, version: int) -> int:
            raise ActorUnavailableError("gone", None)

    async def run() -> None:
        router = GeneratorRouter([Dead(random.Random(0))], RouterTimeouts(rollout_s=0.3, load_s=0.1))  # type: ignore[list-item]
        await router.load(1)
        question = next(read_questions("cards:?split=train"))
        await asyncio.wait_for(router.rollout(RolloutRequest(question, "g", 2, None)), 20)  # type: ignore[arg-type]

    with pytest.raises(InfraFailure, match="no generator was available"):
        asyncio.run(run())
