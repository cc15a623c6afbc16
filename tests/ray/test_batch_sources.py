"""Batch sources of the learner: what a step waits for, and recovery when their actor restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch.distributed as dist

from pixelis.actors.batch_sources import RolloutSource
from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.rollouts import RolloutBatch, StepResult
from pixelis.actors.update_source import UpdateSource
from pixelis.actors.weights import CandidatePublisher, WeightPublisher
from pixelis.config import parse
from pixelis.errors import InfraFailure
from pixelis.policy.samples import LearnerBatch

pytestmark = pytest.mark.slow


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=16)
class BatchMaker:
    """Makes empty batches as Coordinator and Evolution do; ``blocked`` until ``release``."""

    def __init__(self, blocked: bool):
        self.incarnation, self.begun, self.completed = 0, [], []  # type: ignore[var-annotated]
        self.released = asyncio.Event()
        if not blocked:
            self.released.set()

    async def begin(
        self, step: int, state: dict[str, Any], version: int, resumes_rewards: bool = True
    ) -> int:
        self.begun.append((step, state, version, resumes_rewards))
        self.incarnation += 1000 + len(self.begun)
        return self.incarnation

    async def next_batch(self, rank: int, world: int, step: int, incarnation: int) -> RolloutBatch:
        if incarnation != self.incarnation:
            raise InfraFailure("started again", code="restarted")
        return RolloutBatch(step, state={"questions": {"cursor": 4 * (step + 1), "ahead": []}}, metrics={})

    async def step_done(
        self, step: int, version: int, incarnation: int, metrics: dict[str, float] | None = None
    ) -> StepResult:
        await self.released.wait()
        self.completed.append((step, version))
        return StepResult({f"completed/{step}": 1.0}, state={"base": version} if metrics is not None else {})

    async def finish(self) -> dict[str, float]:
        return {"evaluate/accuracy": 0.5}

    async def release(self) -> None:
        self.released.set()

    async def calls(self) -> tuple[list, list]:
        """Return the arguments of every `begin`, and the (step, version) of every `step_done`."""
        return self.begun, self.completed


@ray.remote(num_cpus=0)
class Store:
    def __init__(self) -> None:
        self.count = 0

    def publish(self, weights: Any, stage: str, step: int, *_: Any) -> int:
        self.count += 1
        return self.count

    def keep(self, version: int, weights: Any) -> None:
        """Nothing is kept: no test reads the weights."""

    def promoted(self) -> int:
        return 7


@pytest.fixture
def actors(ray_cluster: None, tmp_path: Path) -> Iterator[list[Any]]:
    """A list of actors, initially a store, that are killed at the end of the test."""
    initialized = dist.is_initialized()  # a Trainer in another test leaves its process group behind
    if not initialized:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    actors: list[Any] = [Store.remote()]  # type: ignore[attr-defined]
    yield actors
    for actor in actors:
        ray.kill(actor)
    if not initialized:
        dist.destroy_process_group()


def learner() -> Any:
    group = SimpleNamespace(share=(0, 1), sum=lambda values, largest=0: values)  # of one worker
    return SimpleNamespace(
        batches=0, is_first=True, served=lambda: "weights", model=SimpleNamespace(sequence=group)
    )


def config(folder: Path, **rft: Any) -> Any:
    return parse({"policy": {"model": "none"}, "run": {"dir": str(folder)}, "rft": rft})


def learn(source: RolloutSource, trainer: Any, batch: LearnerBatch) -> StepResult:
    trainer.batches += 1
    return source.done(batch, source.weights.publish(trainer, {}), {})


def test_an_off_policy_step_does_not_wait_for_the_step_before_except_the_last(
    actors: list[Any], tmp_path: Path
) -> None:
    actors.append(maker := BatchMaker.remote(blocked=True))  # type: ignore[attr-defined]
    settings, trainer = config(tmp_path, steps=4, max_off_policy_steps=1), learner()
    source = RolloutSource(settings, maker, WeightPublisher(actors[0], "rft"))
    with source.open(trainer, {}) as batches:
        for _ in range(3):
            assert learn(source, trainer, next(batches)).metrics == {}
        assert ray.get(maker.calls.remote())[1] == [], "after three steps no version is loaded yet"
        ray.get(maker.release.remote())
        last = learn(source, trainer, next(batches)).metrics
    assert set(last) >= {"completed/3", "evaluate/accuracy"}, "the last step waits for all pending results"
    assert sorted(ray.get(maker.calls.remote())[1]) == [(0, 2), (1, 3), (2, 4), (3, 5)]


def test_on_policy_a_step_ends_when_its_weights_are_loaded(actors: list[Any], tmp_path: Path) -> None:
    actors.append(maker := BatchMaker.remote(blocked=False))  # type: ignore[attr-defined]
    source = RolloutSource(config(tmp_path, steps=2), maker, WeightPublisher(actors[0], "rft"))
    trainer = learner()
    with source.open(trainer, {}) as batches:
        assert learn(source, trainer, next(batches)).metrics == {"completed/0": 1.0}
        assert ray.get(maker.calls.remote())[1] == [(0, 2)]


@pytest.mark.parametrize("kind", ["rollouts", "updates"])
def test_a_restarted_actor_continues_at_the_step_of_the_learner(
    kind: str, actors: list[Any], tmp_path: Path
) -> None:
    store = actors[0]
    actors.append(maker := BatchMaker.remote(blocked=False))  # type: ignore[attr-defined]
    trainer = learner()
    source: RolloutSource | UpdateSource = UpdateSource(config(tmp_path), maker, CandidatePublisher(store, 1))
    if kind == "rollouts":
        source = RolloutSource(config(tmp_path, steps=9), maker, WeightPublisher(store, "rft"))
    with source.open(trainer, {"questions": {"cursor": 0, "ahead": []}}) as batches:
        for _ in range(2):
            learn(source, trainer, next(batches))
        ray.kill(maker, no_restart=False)
        while ray.get(maker.calls.remote())[0]:  # the kill takes effect a moment later
            time.sleep(0.05)
        assert next(batches).step == 2
    ((step, state, version, resumes),), _ = ray.get(maker.calls.remote())
    assert step == 2
    if kind == "rollouts":
        assert (state, version, resumes) == ({"questions": {"cursor": 8, "ahead": []}}, 3, False)
    else:
        assert (state, version) == ({"base": 2}, 7), "the weights are those of the version promoted last"


def test_an_actor_that_restarts_again_and_again_ends_the_run_with_its_cause(
    actors: list[Any], tmp_path: Path
) -> None:
    @ray.remote(num_cpus=0)
    class RestartingMaker:
        def begin(self, *_: Any, **__: Any) -> int:
            return 1

        def next_batch(self, *_: Any) -> None:
            raise InfraFailure("started again", code="restarted")

    actors.append(maker := RestartingMaker.remote())  # type: ignore[attr-defined]
    source = RolloutSource(config(tmp_path), maker, WeightPublisher(actors[0], "rft"))
    with pytest.raises(InfraFailure, match="restarted 5 times") as caught:  # noqa: SIM117
        with source.open(learner(), {}) as batches:
            next(batches)
    assert unwrap_ray_error(caught.value) is caught.value
