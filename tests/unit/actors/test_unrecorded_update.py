"""An update that a restarted Evolution has not recorded leaves the weights: its tasks are learnt again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_promotion import Handle, Store, adapter

from pixelis.actors import batch_sources, policy_store
from pixelis.actors.generator_router import GeneratorRouter
from pixelis.actors.promotion import Promotion
from pixelis.actors.rollouts import RolloutBatch, StepResult
from pixelis.actors.update_source import UpdateSource
from pixelis.actors.weights import CandidatePublisher
from pixelis.config import load
from pixelis.errors import InfraFailure
from pixelis.policy.samples import LearnerBatch


class Local:
    """An object in this process behind the interface of an actor handle."""

    def __init__(self, target: Any):
        self.target = target

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            result = getattr(self.target, name)(*arguments)
            return asyncio.run(result) if asyncio.iscoroutine(result) else result

        return SimpleNamespace(remote=remote)


class Evolution:
    """Empty batches and real promotion, as the actor has them. ``restart`` forgets the learner."""

    def __init__(self, promotion: Promotion):
        self.promotion, self.incarnation, self.bases = promotion, 0, list[int | None]()

    def restart(self) -> None:
        self.incarnation += 1

    async def begin(self, step: int, state: dict[str, Any], version: int) -> int:
        self.bases.append(state["base"])
        await self.promotion.begin(state["base"])
        self.incarnation += 1
        return self.incarnation

    def next_batch(self, rank: int, world: int, step: int, incarnation: int) -> RolloutBatch:
        if incarnation != self.incarnation:
            raise InfraFailure("restarted", code="restarted")
        batch = RolloutBatch(step)
        batch.restore = self.promotion.restore
        return batch

    def step_done(
        self, step: int, version: int | None, incarnation: int, metrics: dict[str, float]
    ) -> StepResult:
        if incarnation != self.incarnation:
            return StepResult()
        self.promotion.learner_reset(self.promotion.restore)
        return StepResult(state={"base": self.promotion.base, "beta": {}})


def test_an_update_that_a_restarted_evolution_ignores_is_thrown_away_and_another_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_store.ray, "put", lambda value: value)
    monkeypatch.setattr(batch_sources.ray, "get", lambda value: value)
    monkeypatch.setattr(batch_sources, "sum_over_workers", lambda values: values)
    monkeypatch.setattr(batch_sources, "rank_and_world_size", lambda: (0, 1))
    config = load(None, [f"run.dir={tmp_path}"])
    store, restored = Store(str(tmp_path)), list[Any]()

    async def note(*_: Any) -> None: ...

    promotion = Promotion(config, Handle(store), GeneratorRouter([]), None, note)  # type: ignore[arg-type]
    evolution = Evolution(promotion)
    weights = adapter(1.0)
    share = SimpleNamespace(share=(0, 1))
    trainer: Any = SimpleNamespace(
        batches=0, served=lambda: weights, model=SimpleNamespace(sequence=share), reset_to=restored.append
    )
    source = UpdateSource(config, Local(evolution), CandidatePublisher(Local(store), every=100))  # type: ignore[arg-type]

    def learn(batch: LearnerBatch) -> None:
        trainer.batches += 1
        source.done(batch, None, {})

    with source.open(trainer, {}) as batches:
        learn(next(batches))
        evolution.restart()  # between two updates: the weights hold recorded ones only
        learn(next(batches))
        assert (evolution.bases, restored) == ([1, 1], [])
        batch = next(batches)
        evolution.restart()
        learn(batch)
        learn(next(batches))
        assert (evolution.bases, len(restored)) == ([1, 1, None], 1)
        assert source.state()["base"] == 1
        evolution.restart()
        learn(next(batches))
        assert (evolution.bases, len(restored)) == ([1, 1, None, 1], 1)
