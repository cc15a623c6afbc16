"""Sources of learner batches: rollouts from the Coordinator, update tasks from Evolution. SFT's is in ``demonstrations``.

Every worker holds its own copy of a source and calls it together with the others; what is decided is decided alike on all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.rollouts import RolloutBatch, StepResult
from pixelis.actors.weights import CandidatePublisher, WeightPublisher
from pixelis.config import Config
from pixelis.errors import InfraFailure
from pixelis.evolution.updates import elected
from pixelis.policy.advantages import assign_advantages
from pixelis.policy.distributed import place, sum_over_workers
from pixelis.policy.samples import LearnerBatch, TrainSample, from_trajectory
from pixelis.records import Group

if TYPE_CHECKING:
    from pixelis.policy.train_step import Trainer

ENDLESS = 10**9
"""Steps of a source that ends when its actor says so."""
RESTARTS = 5
"""Times in a row that the actor behind a source may start again before a batch comes."""


class BatchSource(ABC):
    """Yields a worker's share of batch after batch.

    ``kind`` is how batches are learnt from and what their steps are called in the log; ``steps`` where a run ends.
    """

    kind: Literal["sft", "policy"]
    config: Config
    weights: WeightPublisher
    steps: int

    def prepare(self, step: int) -> None:  # noqa: B027 (most sources prepare nothing)
        """Called before the policy is loaded: what needs no weights begins meanwhile."""

    @contextmanager
    def open(self, trainer: Trainer, state: dict[str, Any]) -> Iterator[Iterator[LearnerBatch]]:
        """The batches after the last one that ``trainer`` has learnt; ``state`` is what its checkpoint kept."""
        self.trainer, (self.rank, self.world) = trainer, place()
        self.begin(state)
        yield self._until_stopped()
        self.end()

    def _until_stopped(self) -> Iterator[LearnerBatch]:
        """All batches, or those until the file ``run.dir/STOP`` appears."""
        stop = Path(self.config.run.dir) / "STOP"
        while not sum_over_workers([float(stop.exists())])[0] and (batch := self.next()) is not None:
            yield batch

    @abstractmethod
    def begin(self, state: dict[str, Any]) -> None:
        """Tell whoever makes the batches where the learner stands."""

    @abstractmethod
    def next(self) -> LearnerBatch | None:
        """This worker's share of the next batch; None at the end."""

    @abstractmethod
    def done(self, batch: LearnerBatch, version: ray.ObjectRef | None, metrics: dict[str, float]) -> StepResult:
        """``batch`` is learnt and ``version`` refers to the number it was published as; what else is known by now."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the state of the last batch; asked of the first worker only."""
        return {}

    def end(self) -> None:  # noqa: B027
        """Called after the last batch."""


class RolloutSource(BatchSource):
    """Batches of scored groups from the Coordinator. RFT rewards their answers, TTRL their agreement.

    With ``max_off_policy_steps=0`` a step ends when the generators hold its weights; else nothing after it is waited for.
    """

    kind: Literal["sft", "policy"] = "policy"

    def __init__(self, config: Config, coordinator: ActorHandle, weights: WeightPublisher):
        self.config, self.actor, self.weights = config, coordinator, weights
        self.steps = config.rft.steps
        self.version: Any = None
        self.last_state: dict[str, Any] = {}
        self.pending: list[ray.ObjectRef] = []
        self.life = 0

    def begin(self, state: dict[str, Any]) -> None:
        """Publish what the checkpoint holds and let the Coordinator start there."""
        self.last_state, self.version = state, self.weights.publish(self.trainer, {}, restart=True)
        self._enter(resumes_rewards=True)

    def _enter(self, **options: bool) -> None:
        """Begin at the trainer's batch on the actor behind, and agree with the other workers on its life."""
        life = 0
        if self.rank == 0:
            life = ray.get(self.actor.begin.remote(self.trainer.batches, self.last_state, self.version, **options))
        self.life = int(sum_over_workers([float(life)])[0])

    def next(self) -> LearnerBatch | None:
        """This worker's groups, with the views read from the object store; a KL taken off the reward is measured here."""
        share = self._share()
        if share is None:
            return None
        views = ray.get(share.views)
        samples, metrics, loss = _samples(share.groups, views), share.metrics, self.config.rft.loss
        if loss.kl > 0 and loss.kl_in == "reward":
            divergence = iter(self.trainer.kl_to_reference(samples))
            kl = [[(next(divergence) or 0.0) if t.advantage is not None else 0.0 for t in g.trajectories] for g in share.groups]
            weighted = {"greedy": share.greedy, "kl": kl, "kl_weight": loss.kl, "sum_workers": sum_over_workers}
            metrics = metrics | assign_advantages(share.groups, self.config.rft.advantage, **weighted)  # type: ignore[arg-type]
            samples = _samples(share.groups, views)
        self.last_state = share.state
        return LearnerBatch(share.step, samples, "policy", metrics, share.state)

    def _share(self) -> RolloutBatch | None:
        """This worker's part of the batch; when the actor behind has started again, all workers begin again with it."""
        for _ in range(RESTARTS):
            share, lost = None, False
            try:
                share = ray.get(self.actor.next_batch.remote(self.rank, self.world, self.trainer.batches, self.life))
            except (RayActorError, InfraFailure) as error:
                cause = unwrap_ray_error(error)
                lost = isinstance(error, RayActorError) or (cause is not None and cause.code == "restarted")
                if not lost:
                    raise
            if not sum_over_workers([float(lost)])[0]:
                return share
            self._enter(resumes_rewards=False)
        raise InfraFailure(f"the actor that makes the batches started again {RESTARTS} times without giving one")

    def done(self, batch: LearnerBatch, version: ray.ObjectRef | None, metrics: dict[str, float]) -> StepResult:
        """Let the generators load the version and rewards advance; evaluations are waited for after the last batch only."""
        if self.rank:
            return StepResult()
        self.version = version
        self.pending.append(self.actor.step_done.remote(batch.step, version, self.life))
        last = batch.step + 1 == self.steps
        wait = None if last or not self.config.rft.max_off_policy_steps else 0
        ready, self.pending = ray.wait(self.pending, num_returns=len(self.pending), timeout=wait)
        results: list[StepResult] = ray.get(ready)
        merged = {name: value for result in results for name, value in result.metrics.items()}
        if last:
            merged |= ray.get(self.actor.finish.remote())
        return StepResult(merged, next((result.boundary for result in results if result.boundary), None))

    def state(self) -> dict[str, Any]:
        """The running state of the rewards."""
        return ray.get(self.actor.keep.remote())

    def end(self) -> None:
        """Evaluations that were started come to their end, also where the run ended before its last step."""
        if self.rank == 0:
            ray.get(self.actor.finish.remote())


class UpdateSource(RolloutSource):
    """Update tasks from Evolution, without end; what is learnt is published as candidates, and Evolution decides.

    What a checkpoint holds may have been refused or withdrawn since: a learner that starts says which promoted version its
    weights come from, and is sent back when another one is promoted by then.
    """

    weights: CandidatePublisher

    def __init__(self, config: Config, evolution: ActorHandle, weights: CandidatePublisher):
        super().__init__(config, evolution, weights)
        self.settings, self.steps = config.evolution, ENDLESS

    def begin(self, state: dict[str, Any]) -> None:
        """Start from what is promoted; where nothing was learnt yet that is the starting policy, kept as a version."""
        self.weights.unpublished = 0
        self.last_state = state
        store, weights = self.weights.store, self.trainer.served()
        if self.rank == 0 and store is not None:
            self.version = ray.get(store.promoted.remote())
            if self.trainer.batches == 0 and self.version == 0:
                self.version = ray.get(store.publish.remote(weights, self.weights.stage, 0))
                self.last_state = {"base": self.version}
        self._enter()

    def _enter(self, **_: bool) -> None:
        super()._enter()

    def next(self) -> LearnerBatch | None:
        """This worker's groups, from the weights that Evolution names.

        With objective=answer every episode is learnt with the elected answer at its end, weighted; what was written guards it.
        """
        share = self._share()
        if share is None:
            return None
        if share.restore is not None:
            assert self.weights.store is not None
            (ref,) = ray.get(self.weights.store.get.remote(share.restore))
            self.trainer.reset_to(ray.get(ref))
            self.weights.unpublished = 0
        views = ray.get(share.views)
        samples = _samples(share.groups, views)
        batch = LearnerBatch(share.step, samples, "policy", share.metrics, {}, dict(share.options), optional=True)
        if self.settings.objective == "answer":
            batch.samples, batch.kind = self._elected(share.groups, views), "sft"
            batch.options["sampled"] = samples
        return batch

    def _elected(self, groups: list[Group], views: list[dict[str, Any]]) -> list[TrainSample]:
        samples = []
        for group, shown in zip(groups, views, strict=True):
            for trajectory, agreed in elected(group.trajectories, group.question.meta["pseudo_label"]):
                sample = from_trajectory(trajectory, shown[trajectory.id])
                last = len(trajectory.turns[-1].tokens)
                sample.weights = sample.mask * np.float32(self.settings.call_weight * agreed)
                sample.weights[-last:] = sample.mask[-last:]
                samples.append(sample)
        return samples

    def done(self, batch: LearnerBatch, version: ray.ObjectRef | None, metrics: dict[str, float]) -> StepResult:
        """Tell Evolution of the update; returns when its candidate, if there is one, serves or is refused."""
        if self.rank:
            return StepResult()
        result: StepResult = ray.get(self.actor.step_done.remote(batch.step, version, self.life, metrics))
        if result.state:
            self.last_state = result.state
        return result

    def state(self) -> dict[str, Any]:
        """Where the weights come from, and the KL guard."""
        return self.last_state

    def end(self) -> None:
        """What was learnt last is published as well."""
        if not self.weights.unpublished:
            return
        version = self.weights.publish(self.trainer, {"evolve/skipped": 1.0})
        if self.rank == 0:
            ray.get(self.actor.candidate.remote(version))


def _samples(groups: list[Group], views: list[dict[str, Any]]) -> list[TrainSample]:
    """What is trained on: every trajectory that has an advantage."""
    return [
        from_trajectory(trajectory, shown[trajectory.id])
        for group, shown in zip(groups, views, strict=True)
        for trajectory in group.trajectories
        if trajectory.advantage is not None
    ]
