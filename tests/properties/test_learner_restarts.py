"""A learner that dies and the next one that begins: calls of the first change nothing for the second."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_coordinator import REAL, Generator, Method, Scorer, settings_of, without_ray

from pixelis.actors.coordinator import StepResult
from pixelis.errors import InfraFailure
from pixelis.rewards.grader import Advance


@pytest.fixture(scope="module", autouse=True)
def scripted() -> Iterator[None]:
    with without_ray():
        yield


async def numbers_of(coordinator: Any, steps: range, incarnation: int) -> list[int]:
    """Numbers of the questions of some batches, which are learnt."""
    numbers = []
    for step in steps:
        numbers += (await asyncio.wait_for(coordinator.next_batch(0, 1, step, incarnation), 10)).numbers
        await coordinator.step_done(step, 21 + step, incarnation)
    return numbers


def test_a_batch_that_a_dead_learner_waited_for_takes_no_group_from_the_next_learner() -> None:
    config = settings_of(prompts_per_step=3, group_size=2, steps=4)

    async def run() -> list[int]:
        coordinator = REAL(config, [Generator(random.Random(1)), Generator(random.Random(2))], [Scorer()])
        first = await coordinator.begin(0, {}, 10)
        await numbers_of(coordinator, range(2), first)
        waiting = asyncio.ensure_future(coordinator.next_batch(0, 1, 2, first))
        await asyncio.sleep(0)
        second = await coordinator.begin(1, {"questions": {"cursor": 3}}, 21)
        with pytest.raises(InfraFailure, match="has restarted"):
            await asyncio.wait_for(waiting, 10)
        return await numbers_of(coordinator, range(1, 4), second)

    assert asyncio.run(run()) == list(range(3, 12))


@dataclass
class Locked(Generator):
    """Loads a version when the test allows it."""

    may_load: asyncio.Event = field(default_factory=asyncio.Event)

    async def _load(self, version: int) -> int:
        await self.may_load.wait()
        return await super()._load(version)


def test_a_learner_that_begins_while_another_does_has_the_only_producer() -> None:
    config = settings_of(prompts_per_step=4, group_size=2, steps=3)

    async def run() -> list[int]:
        generator = Locked(random.Random(1))
        coordinator = REAL(config, [generator], [Scorer()])
        dead = asyncio.ensure_future(coordinator.begin(0, {}, 10))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(coordinator.begin(0, {}, 10))
        await asyncio.sleep(0.01)
        generator.may_load.set()
        with pytest.raises(InfraFailure, match="has restarted"):
            await dead
        return await numbers_of(coordinator, range(3), await second)

    assert asyncio.run(run()) == list(range(12))


def test_a_step_of_a_dead_learner_does_not_advance_the_rewards_that_the_next_one_resumed() -> None:
    config, calls = settings_of(prompts_per_step=2, group_size=2, steps=30), list[Any]()

    class Recorded(Scorer):
        async def _load(self, state: bytes | None) -> None:
            calls.append("load")

        async def _advance(self, step: int, is_last: bool = False) -> Advance:
            calls.append(step)
            return Advance()

    async def run() -> None:
        coordinator = REAL(config, [Generator(random.Random(1))], [Recorded()])
        dead = await coordinator.begin(14, {}, 14)
        await coordinator.next_batch(0, 1, 14, dead)
        async with coordinator.router.reserve(14):  # an evaluation has the only generator
            old = asyncio.ensure_future(coordinator.step_done(14, 15, dead))
            await asyncio.sleep(0.01)
            new = asyncio.ensure_future(coordinator.begin(10, {}, 10))
            await asyncio.sleep(0.01)
        await numbers_of(coordinator, range(10, 11), await new)
        assert await old == StepResult()

    asyncio.run(run())
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


def test_generators_that_go_to_sleep_for_a_dead_learner_are_awake_for_the_next_one() -> None:
    config = settings_of(prompts_per_step=2, group_size=2, steps=3)
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"colocate": True})})

    async def run() -> None:
        generator = Sleeper(random.Random(1))
        coordinator = REAL(config, [generator], [Scorer()])
        dead = asyncio.ensure_future(coordinator.next_batch(0, 1, 0, await coordinator.begin(0, {}, 10)))
        while coordinator.router.awake.is_set():
            await asyncio.sleep(0.001)
        incarnation = await asyncio.wait_for(coordinator.begin(0, {}, 10), 10)
        await dead
        assert not generator.asleep
        for step in range(3):
            await asyncio.wait_for(coordinator.next_batch(0, 1, step, incarnation), 10)
            assert generator.asleep
            await asyncio.wait_for(coordinator.step_done(step, 11 + step, incarnation), 10)

    asyncio.run(run())
