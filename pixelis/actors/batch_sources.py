"""Sources of learner batches: rollouts from the Coordinator, update tasks from Evolution. The SFT source is in
``demonstrations``.

Every worker holds its own copy of a source. All workers call each method together and take the same decisions.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.group_views import Views, fetch_groups
from pixelis.actors.rollouts import RolloutBatch, StepResult
from pixelis.actors.update_pictures import fetch
from pixelis.actors.weights import CandidatePublisher, WeightPublisher
from pixelis.config import Config
from pixelis.dialogue.augmentation import corrected
from pixelis.errors import InfraFailure
from pixelis.evolution.updates import agreeing
from pixelis.policy.advantages import assign_advantages
from pixelis.policy.distributed import rank_and_world_size, release_cached_memory, sum_over_workers
from pixelis.policy.samples import LearnerBatch, TrainSample, from_trajectory
from pixelis.policy.token_advantages import assign_token_advantages
from pixelis.records import Group

if TYPE_CHECKING:
    from pixelis.policy.train_step import Trainer

UNLIMITED_STEPS = 10**9
"""Step limit of a source that ends when its actor does."""
MAX_RESTARTS = 5
"""Consecutive restarts of the source's actor without a batch in between, after which training fails."""


class BatchSource(ABC):
    """Iterates over a worker's share of the batches.

    ``kind`` selects the loss and names the steps in the log; ``steps`` is the last step of a run.
    """

    kind: Literal["sft", "policy"]
    config: Config
    weights: WeightPublisher
    steps: int

    def prepare(self, step: int) -> None:  # noqa: B027 (optional)
        """Start work that needs no weights. Called before the policy is loaded."""

    @contextmanager
    def open(self, trainer: Trainer, state: dict[str, Any]) -> Iterator[Iterator[LearnerBatch]]:
        """Iterate over the batches after the trainer's last one; ``state`` comes from its checkpoint."""
        self.trainer, (self.rank, _), (self.share, self.shares) = trainer, rank_and_world_size(), trainer.sequence.share
        self.begin(state)
        yield self._until_stopped()
        self.end()

    def _until_stopped(self) -> Iterator[LearnerBatch]:
        """All batches until the end, or until the file ``run.dir/STOP`` appears."""
        stop = Path(self.config.run.dir) / "STOP"
        while not sum_over_workers([float(stop.exists())])[0] and (batch := self.next()) is not None:
            yield batch

    @abstractmethod
    def begin(self, state: dict[str, Any]) -> None:
        """Synchronise the producer of the batches with the learner's position."""

    @abstractmethod
    def next(self) -> LearnerBatch | None:
        """This worker's share of the next batch; None at the end."""

    @abstractmethod
    def done(self, batch: LearnerBatch, version: ray.ObjectRef | None, metrics: dict[str, float]) -> StepResult:
        """Report that ``batch`` is learnt and published as ``version``; returns results that are available by now."""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint beside that of the last batch. Called on the first worker only."""
        return {}

    def end(self) -> None:  # noqa: B027
        """Clean up after the last batch."""


class RolloutSource(BatchSource):
    """Batches of scored groups from the Coordinator, for RFT and TTRL.

    With ``max_off_policy_steps=0`` a step ends when the generators have loaded its weights; otherwise it waits for nothing.
    """

    kind: Literal["sft", "policy"] = "policy"

    def __init__(self, config: Config, coordinator: ActorHandle, weights: WeightPublisher):
        self.config, self.actor, self.weights = config, coordinator, weights
        self.steps = config.rft.steps
        self.version: Any = None
        self.last_state: dict[str, Any] = {}
        self.pending: list[ray.ObjectRef] = []
        self.incarnation = 0

    def begin(self, state: dict[str, Any]) -> None:
        """Publish the weights of the checkpoint and start the Coordinator at its batch."""
        self.last_state, self.version = state, self.weights.publish(self.trainer, {}, restart=True)
        self._start_actor(resumes_rewards=True)

    def _start_actor(self, **options: bool) -> None:
        """Start the actor at the trainer's batch and share its incarnation with the other workers."""
        incarnation = 0
        if self.rank == 0:
            incarnation = ray.get(self.actor.begin.remote(self.trainer.batches, self.last_state, self.version, **options))
        self.incarnation = int(sum_over_workers([float(incarnation)])[0])

    def next(self) -> LearnerBatch | None:
        """This worker's groups with their views. Computes KL penalties of rewards and advantages of tokens, if configured."""
        share = self._share()
        if share is None:
            return None
        views = fetch_groups(share.views)
        samples, metrics, loss = _samples(share.groups, views), share.metrics, self.config.rft.loss
        if self.config.rft.by_token:
            rewards = [t.reward or 0.0 for g in share.groups for t in g.trajectories if t.advantage is not None]
            metrics = metrics | assign_token_advantages(self.trainer, samples, rewards, self.config.rft.advantage)
        elif loss.kl > 0 and loss.kl_in == "reward":
            sums = self.trainer.kl_to_reference(samples)
            counts = [s.policy_tokens for s, k in zip(samples, sums, strict=True) if k is not None]
            total, tokens = self.trainer.sequence.sum([float(sum(k or 0.0 for k in sums)), float(sum(counts))])
            divergence = iter(sums)
            kl = [[(next(divergence) or 0.0) if t.advantage is not None else 0.0 for t in g.trajectories] for g in share.groups]
            weighted = {
                "greedy": share.greedy,
                "kl": kl,
                "kl_weight": self.trainer.kl_coefficient,
                "sum_workers": self.trainer.sequence.sum,
            }
            metrics = metrics | assign_advantages(share.groups, self.config.rft.advantage, **weighted)  # type: ignore[arg-type]
            samples = _samples(share.groups, views)
            self.trainer.adapt_kl(total / max(tokens, 1.0))
        self.last_state = share.state
        return LearnerBatch(share.step, samples, "policy", metrics, share.state)

    def _share(self) -> RolloutBatch | None:
        """This worker's part of the batch. If the actor has restarted, all workers start it again at the same batch."""
        for _ in range(MAX_RESTARTS):
            share, has_restarted = None, False
            try:
                share = ray.get(self.actor.next_batch.remote(self.share, self.shares, self.trainer.batches, self.incarnation))
            except (RayActorError, InfraFailure) as error:
                cause = unwrap_ray_error(error)
                has_restarted = isinstance(error, RayActorError) or (cause is not None and cause.code == "restarted")
                if not has_restarted:
                    raise
            if not sum_over_workers([float(has_restarted)])[0]:
                return share
            self._start_actor(resumes_rewards=False)
        raise InfraFailure(f"the actor that produces batches restarted {MAX_RESTARTS} times without producing one")

    def done(self, batch: LearnerBatch, version: ray.ObjectRef | None, metrics: dict[str, float]) -> StepResult:
        """Load the version on the generators and advance the rewards. Waits for evaluations only after the last batch."""
        if self.config.engine.colocate:
            release_cached_memory()
        if self.rank:
            return StepResult()
        self.version = version
        self.pending.append(self.actor.step_done.remote(batch.step, version, self.incarnation))
        is_last = batch.step + 1 == self.steps
        timeout = None if is_last or not self.config.rft.max_off_policy_steps else 0
        ready, self.pending = ray.wait(self.pending, num_returns=len(self.pending), timeout=timeout)
        results: list[StepResult] = ray.get(ready)
        merged = {name: value for result in results for name, value in result.metrics.items()}
        if is_last:
            merged |= ray.get(self.actor.finish.remote())
        return StepResult(merged, next((result.boundary for result in results if result.boundary), None))

    def state(self) -> dict[str, Any]:
        """The running state of the rewards."""
        return ray.get(self.actor.reward_state.remote())

    def end(self) -> None:
        """Wait for running evaluations, also if the run was stopped early."""
        if self.rank == 0:
            ray.get(self.actor.finish.remote())


class UpdateSource(RolloutSource):
    """Update tasks from Evolution, without end. Updates are published as candidates, which Evolution promotes or rejects.

    A checkpoint's weights may have been rejected or rolled back since. A starting learner therefore reports the promoted version
    that its weights descend from, and Evolution resets it if another version is promoted by then, or if the weights hold an
    update that no Evolution actor has recorded.
    """

    weights: CandidatePublisher

    def __init__(self, config: Config, evolution: ActorHandle, weights: CandidatePublisher):
        super().__init__(config, evolution, weights)
        self.settings, self.steps = config.evolution, UNLIMITED_STEPS

    def begin(self, state: dict[str, Any]) -> None:
        """Start from the promoted version. Before the first update the starting policy is published as a version."""
        self.weights.unpublished = 0
        self.last_state = state
        store, weights = self.weights.store, self.trainer.served()
        if self.rank == 0 and store is not None:
            self.version = ray.get(store.promoted.remote())
            if self.trainer.batches == 0 and self.version == 0:
                self.version = ray.get(store.publish.remote(weights, self.weights.stage, 0))
                self.last_state = {"base": self.version}
        self._start_actor()

    def _start_actor(self, **_: bool) -> None:
        super()._start_actor()

    def next(self) -> LearnerBatch | None:
        """This worker's groups, after resetting to the weights that Evolution requests.

        With objective=answer these are episodes that gave the elected answer; the KL limit applies to what the policy sampled.
        """
        share = self._share()
        if share is None:
            return None
        if share.restore is not None:
            assert self.weights.store is not None
            (ref,) = ray.get(self.weights.store.get.remote(share.restore))
            self.trainer.reset_to(ray.get(ref))
            self.weights.unpublished = 0
        views = fetch(share.views)
        samples = _samples(share.groups, views)
        batch = LearnerBatch(share.step, samples, "policy", share.metrics, {}, dict(share.options), optional=True)
        if self.settings.objective == "answer":
            batch.samples, batch.kind = self._agreeing(share.groups, views), "sft"
            batch.options["sampled"] = samples
        return batch

    def _agreeing(self, groups: list[Group], views: list[Views]) -> list[TrainSample]:
        """Up to `evolution.train_samples` episodes of each group that gave its label, with the pictures as they are.

        With `serve.augmentations` also as corrected: what the policy can do in usual light remains in what it learns.
        """
        samples, settings, names = [], self.config.evolution, self.config.serve.augmentations
        for group, group_views in zip(groups, views, strict=True):
            candidates = agreeing(group.trajectories, group.question.meta["pseudo_label"])
            rng = random.Random(group.id)
            for trajectory in rng.sample(candidates, min(settings.train_samples, len(candidates))):
                shown = [group_views[trajectory.id]]
                if names:
                    shown.append(corrected(trajectory, shown[0], trajectory.augmentation or rng.choice(names)))
                samples += [from_trajectory(trajectory, pictures) for pictures in shown]
        return samples

    def done(self, batch: LearnerBatch, version: ray.ObjectRef | None, metrics: dict[str, float]) -> StepResult:
        """Report the update to Evolution; returns when its candidate, if there is one, is promoted or rejected."""
        if self.rank:
            return StepResult()
        result: StepResult = ray.get(self.actor.step_done.remote(batch.step, version, self.incarnation, metrics))
        # A restarted Evolution ignores the update and hands out its approved tasks again: the weights must lose it.
        self.last_state = result.state or {**self.last_state, "base": None}
        return result

    def state(self) -> dict[str, Any]:
        """Origin of the weights and state of the KL controller."""
        return self.last_state

    def end(self) -> None:
        """Publish the updates since the last candidate."""
        if not self.weights.unpublished:
            return
        version = self.weights.publish(self.trainer, {"evolve/skipped": 1.0})
        if self.rank == 0:
            ray.get(self.actor.candidate.remote(version))


def _samples(groups: list[Group], views: list[Views]) -> list[TrainSample]:
    """Samples of the trajectories that have an advantage and whose log-probabilities are those of the pictures as they are."""
    return [
        from_trajectory(trajectory, group_views[trajectory.id])
        for group, group_views in zip(groups, views, strict=True)
        for trajectory in group.trajectories
        if trajectory.advantage is not None and trajectory.augmentation is None
    ]
