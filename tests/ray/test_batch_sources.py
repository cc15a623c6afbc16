"""A learner's side of its batches: off-policy nothing after a step is waited for; an actor that restarts is begun again."""

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

from pixelis.actors.batch_sources import RolloutSource, UpdateSource
from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.rollouts import RolloutBatch, StepResult
from pixelis.actors.weights import CandidatePublisher, WeightPublisher
from pixelis.config import parse
from pixelis.errors import InfraFailure
from pixelis.policy.samples import LearnerBatch

pytestmark = pytest.mark.slow


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=16)
class Maker:
    """Makes empty batches as Coordinator and Evolution do; what follows a step takes until ``release``."""

    def __init__(self, hold: bool):
        self.incarnation, self.begun, self.told = 0, [], []  # type: ignore[var-annotated]
        self.released = asyncio.Event()
        if not hold:
            self.released.set()

    async def begin(self, step: int, state: dict[str, Any], version: int, resumes_rewards: bool = True) -> int:
        self.begun.append((step, state, version, resumes_rewards))
        self.incarnation += 1000 + len(self.begun)
        return self.incarnation

    async def next_batch(self, rank: int, world: int, step: int, incarnation: int) -> RolloutBatch:
        if incarnation != self.incarnation:
            raise InfraFailure("started again", code="restarted")
        return RolloutBatch(step, state={"questions": {"cursor": 4 * (step + 1), "ahead": []}}, metrics={})

    async def step_done(self, step: int, version: int, incarnation: int, metrics: dict[str, float] | None = None) -> StepResult:
        await self.released.wait()
        self.told.append((step, version))
        return StepResult({f"told/{step}": 1.0}, state={"base": version} if metrics is not None else {})

    async def finish(self) -> dict[str, float]:
        return {"evaluate/accuracy": 0.5}

    async def release(self) -> None:
        self.released.set()

    async def seen(self) -> tuple[list, list]:
        return self.begun, self.told


@ray.remote(num_cpus=0)
class Store:
    def __init__(self) -> None:
        self.count = 0

    def publish(self, weights: Any, stage: str, step: int, *_: Any) -> int:
        self.count += 1
        return self.count

    def promoted(self) -> int:
        return 7


@pytest.fixture
def actors(ray_cluster: None, tmp_path: Path) -> Iterator[list[Any]]:
    own = not dist.is_initialized()  # a Trainer in another test leaves its group of one behind
    if own:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    placed: list[Any] = [Store.remote()]  # type: ignore[attr-defined]
    yield placed
    for actor in placed:
        ray.kill(actor)
    if own:
        dist.destroy_process_group()


def learner() -> Any:
    return SimpleNamespace(batches=0, is_first=True, served=lambda: "weights")


def config(folder: Path, **rft: Any) -> Any:
    return parse({"policy": {"model": "none"}, "run": {"dir": str(folder)}, "rft": rft})


def learn(source: RolloutSource, trainer: Any, batch: LearnerBatch) -> StepResult:
    trainer.batches += 1
    return source.done(batch, source.weights.publish(trainer, {}), {})


def test_off_policy_nothing_is_waited_for_until_the_last_step(actors: list[Any], tmp_path: Path) -> None:
    store = actors[0]
    actors.append(maker := Maker.remote(hold=True))  # type: ignore[attr-defined]
    source, trainer = (
        RolloutSource(config(tmp_path, steps=4, max_off_policy_steps=1), maker, WeightPublisher(store, "rft")),
        learner(),
    )
    with source.open(trainer, {}) as batches:
        for _ in range(3):
            assert learn(source, trainer, next(batches)).metrics == {}
        assert ray.get(maker.seen.remote())[1] == [], "three steps are made, and the first is not even loaded"
        ray.get(maker.release.remote())
        last = learn(source, trainer, next(batches)).metrics
    assert set(last) >= {"told/3", "evaluate/accuracy"}, "the last step brings what was still on its way"
    assert sorted(ray.get(maker.seen.remote())[1]) == [(0, 2), (1, 3), (2, 4), (3, 5)]


def test_on_policy_a_step_ends_when_its_weights_are_loaded(actors: list[Any], tmp_path: Path) -> None:
    actors.append(maker := Maker.remote(hold=False))  # type: ignore[attr-defined]
    source, trainer = RolloutSource(config(tmp_path, steps=2), maker, WeightPublisher(actors[0], "rft")), learner()
    with source.open(trainer, {}) as batches:
        assert learn(source, trainer, next(batches)).metrics == {"told/0": 1.0}
        assert ray.get(maker.seen.remote())[1] == [(0, 2)]


@pytest.mark.parametrize("kind", ["rollouts", "updates"])
def test_an_actor_that_starts_again_is_begun_again_where_the_learner_stands(kind: str, actors: list[Any], tmp_path: Path) -> None:
    store = actors[0]
    actors.append(maker := Maker.remote(hold=False))  # type: ignore[attr-defined]
    trainer = learner()
    if kind == "rollouts":
        source: RolloutSource = RolloutSource(config(tmp_path, steps=9), maker, WeightPublisher(store, "rft"))
    else:
        source = UpdateSource(config(tmp_path), maker, CandidatePublisher(store, every=1))
    with source.open(trainer, {"questions": {"cursor": 0, "ahead": []}}) as batches:
        for _ in range(2):
            learn(source, trainer, next(batches))
        ray.kill(maker, no_restart=False)
        while ray.get(maker.seen.remote())[0]:  # it ends a moment later
            time.sleep(0.05)
        assert next(batches).step == 2
    ((step, state, version, resumes),), _ = ray.get(maker.seen.remote())
    assert step == 2
    if kind == "rollouts":
        assert (state, version, resumes) == ({"questions": {"cursor": 8, "ahead": []}}, 3, False)
    else:
        assert (state, version) == ({"base": 2}, 7), "the weights come from what was promoted last"


def test_an_actor_that_cannot_stay_ends_the_run_with_its_cause(actors: list[Any], tmp_path: Path) -> None:
    @ray.remote(num_cpus=0)
    class Restless:
        def begin(self, *_: Any, **__: Any) -> int:
            return 1

        def next_batch(self, *_: Any) -> None:
            raise InfraFailure("started again", code="restarted")

    actors.append(maker := Restless.remote())  # type: ignore[attr-defined]
    source, trainer = RolloutSource(config(tmp_path), maker, WeightPublisher(actors[0], "rft")), learner()
    with pytest.raises(InfraFailure, match="restarted 5 times") as caught, source.open(trainer, {}) as batches:
        next(batches)
    assert unwrap_ray_error(caught.value) is caught.value
