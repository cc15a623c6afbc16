"""Sources of learner batches: the protocol, and scored groups from the Coordinator for RFT and TTRL.

Every worker holds its own copy. All workers call each method together and take the same decisions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from pixelis.actors import report
from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.group_views import Views, fetch_groups
from pixelis.actors.rollouts import RolloutBatch, StepResult
from pixelis.actors.teachers import Teachers
from pixelis.actors.weights import WeightPublisher
from pixelis.config import Config
from pixelis.errors import InfraFailure
from pixelis.policy.advantages import assign_advantages
from pixelis.policy.distributed import rank_and_world_size, release_cached_memory, sum_over_workers
from pixelis.policy.samples import LearnerBatch, TrainSample, from_trajectory
from pixelis.policy.token_advantages import assign_token_advantages
from pixelis.records import Group, Trajectory

if TYPE_CHECKING:
    from pixelis.policy.train_step import Trainer

V = TypeVar("V")
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
        self.trainer = trainer
        (self.rank, _) = rank_and_world_size()
        (self.share, self.shares) = trainer.model.sequence.share
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
    def done(
        self, batch: LearnerBatch, version: ray.ObjectRef | None, metrics: dict[str, float]
    ) -> StepResult:
        """Report that ``batch`` is learnt and published as ``version``; returns what is known by now."""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint beside that of the last batch. Called on the first worker only."""
        return {}

    def end(self) -> None:  # noqa: B027
        """Clean up after the last batch."""


class RolloutSource(BatchSource):
    """Batches of scored groups from the Coordinator, for RFT and TTRL.

    With ``max_off_policy_steps=0`` a step ends when the generators have loaded its weights; otherwise it
    waits for nothing.
    """

    kind: Literal["sft", "policy"] = "policy"

    def __init__(
        self,
        config: Config,
        coordinator: ActorHandle,
        weights: WeightPublisher,
        teachers: Mapping[str, ActorHandle] | None = None,
    ):
        self.config, self.actor, self.weights = config, coordinator, weights
        self.teacher_actors = teachers or {}
        self.steps = config.rft.steps
        self.version: Any = None
        self.last_state: dict[str, Any] = {}
        self.pending: list[ray.ObjectRef] = []
        self.page: ray.ObjectRef | None = None
        self.incarnation = 0
        self.teachers: Teachers | None = None

    def begin(self, state: dict[str, Any]) -> None:
        if self.config.rft.teacher.names:
            self.teachers = Teachers(self.config, self.trainer, self.weights.store, self.teacher_actors)
        self.last_state, self.version = state, self.weights.publish(self.trainer, {}, restart=True)
        self._start_actor(resumes_rewards=True)

    def _start_actor(self, **options: bool) -> None:
        incarnation = 0
        if self.rank == 0:
            position = self.trainer.batches, self.last_state, self.version
            incarnation = ray.get(self.actor.begin.remote(*position, **options))
        self.incarnation = int(sum_over_workers([float(incarnation)])[0])

    def next(self) -> LearnerBatch | None:
        """This worker's groups with KL penalties of rewards, advantages of tokens and teachers, if configured."""
        share = self._share()
        if share is None:
            return None
        views = fetch_groups(share.views)
        samples, metrics, loss = samples_of(share.groups, views), share.metrics, self.config.rft.loss
        if self.config.rft.by_token:
            trained = [t for g in share.groups for t in g.trajectories if t.advantage is not None]
            rewards, advantage = [t.reward or 0.0 for t in trained], self.config.rft.advantage
            metrics = metrics | assign_token_advantages(self.trainer, samples, rewards, advantage)
        elif loss.kl > 0 and loss.kl_in == "reward":
            sums = self.trainer.model.kl_to_reference(samples)
            counts = [s.policy_tokens for s, k in zip(samples, sums, strict=True) if k is not None]
            totals = [float(sum(k or 0.0 for k in sums)), float(sum(counts))]
            total, tokens = self.trainer.model.sequence.sum(totals)
            divergence = iter(sums)
            kl = [
                [(next(divergence) or 0.0) if t.advantage is not None else 0.0 for t in g.trajectories]
                for g in share.groups
            ]
            metrics = metrics | assign_advantages(
                share.groups,
                self.config.rft.advantage,
                greedy=share.greedy,
                kl=kl,
                kl_weight=self.trainer.rft.kl_coefficient,
                sum_workers=self.trainer.model.sequence.sum,
            )
            samples = samples_of(share.groups, views)
            self.trainer.rft.adapt_kl(total / max(tokens, 1.0))
        if self.teachers is not None:
            metrics = metrics | self.teachers.advise(trained_episodes(share.groups, views), samples)
        every = self.config.rft.evaluate_every
        if every and (share.step + 1) % every == 0 and self.config.telemetry.trajectories:
            self._show_drift(share, samples)
        self.last_state = share.state
        return LearnerBatch(share.step, samples, "policy", metrics, share.state)

    def _show_drift(self, share: RolloutBatch, samples: list[TrainSample]) -> None:
        """Start the page of `telemetry.trajectories` episodes of a batch, with the drift of each as its title."""
        count = self.config.telemetry.trajectories
        log_probs = self.trainer.model.log_probs(samples[:count])
        chosen: list[report.Chosen] = []
        episodes = trained_episodes(share.groups, share.views)
        for (group, views, trajectory), sample, values in zip(episodes, samples, log_probs, strict=False):
            if len(values):
                drift = np.abs(values - sample.log_probs[sample.mask])
                title = f"drift {drift.mean():.2g} a token, at most {drift.max():.2g}"
                chosen.append((title, group.model_copy(update={"trajectories": [trajectory]}), views))
        if chosen and self.rank == 0:
            self.page = report.show_trained(self.config, share.step + 1, chosen)

    def _share(self) -> RolloutBatch | None:
        """This worker's part of the batch. If the actor has restarted, all workers start it again there."""
        for _ in range(MAX_RESTARTS):
            share, has_restarted = None, False
            request = self.share, self.shares, self.trainer.batches, self.incarnation
            try:
                share = ray.get(self.actor.next_batch.remote(*request))
            except RayActorError:
                has_restarted = True
            except InfraFailure as error:
                if (cause := unwrap_ray_error(error)) is None or cause.code != "restarted":
                    raise
                has_restarted = True
            if not sum_over_workers([float(has_restarted)])[0]:
                return share
            self._start_actor(resumes_rewards=False)
        raise InfraFailure(
            f"the actor that produces batches restarted {MAX_RESTARTS} times without producing one"
        )

    def done(
        self, batch: LearnerBatch, version: ray.ObjectRef | None, metrics: dict[str, float]
    ) -> StepResult:
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
        merged = StepResult.merged(results)
        if is_last:
            merged.metrics |= ray.get(self.actor.finish.remote())
        return merged

    def state(self) -> dict[str, Any]:
        return ray.get(self.actor.reward_state.remote())

    def end(self) -> None:
        if self.rank == 0:
            ray.get([self.actor.finish.remote(), *([self.page] if self.page is not None else [])])


def samples_of(groups: list[Group], views: list[Views]) -> list[TrainSample]:
    return [
        from_trajectory(trajectory, group_views[trajectory.id])
        for _, group_views, trajectory in trained_episodes(groups, views)
    ]


def trained_episodes(groups: list[Group], views: list[V]) -> list[tuple[Group, V, Trajectory]]:
    """The trajectories with an advantage that saw the pictures as they are, with their groups."""
    return [
        (group, group_views, trajectory)
        for group, group_views in zip(groups, views, strict=True)
        for trajectory in group.trajectories
        if trajectory.advantage is not None and trajectory.augmentation is None
    ]
