"""The source of batches of online evolution: update tasks from the Evolution actor."""

from __future__ import annotations

import random
from typing import Any

import ray
from ray.actor import ActorHandle

from pixelis.actors.batch_sources import RolloutSource, samples_of
from pixelis.actors.group_views import Views, fetch
from pixelis.actors.rollouts import StepResult
from pixelis.actors.weights import CandidatePublisher
from pixelis.config import Config
from pixelis.dialogue.augmentation import corrected
from pixelis.evolution.updates import agreeing
from pixelis.policy.distributed import sum_over_workers
from pixelis.policy.samples import LearnerBatch, TrainSample, from_trajectory
from pixelis.records import Group

UNLIMITED_STEPS = 10**9


class UpdateSource(RolloutSource):
    """Update tasks from Evolution, without end, published as candidates that it promotes or rejects.

    A starting learner reports the promoted version that its weights descend from. Evolution resets it if
    another one is promoted by then, or if the weights hold an update that it has not recorded.
    """

    weights: CandidatePublisher

    def __init__(self, config: Config, evolution: ActorHandle, weights: CandidatePublisher):
        super().__init__(config, evolution, weights)
        self.settings, self.steps = config.evolution, UNLIMITED_STEPS

    def begin(self, state: dict[str, Any]) -> None:
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

        With objective=answer these are episodes that gave the elected answer.
        """
        share = self._share()
        if share is None:
            return None
        if share.restore is not None:
            assert self.weights.store is not None
            (ref,) = ray.get(self.weights.store.get.remote(share.restore))
            self.trainer.reset_to(ray.get(ref))
            self.weights.unpublished = 0
        elif share.resume is not None:
            self.trainer.restore(share.resume, verify=False)
        self.weights.ordered = share.publish
        views = fetch(share.views)
        samples = samples_of(share.groups, views)
        if self.settings.words:
            self._score_transplanted(share.groups, samples)
        batch = LearnerBatch(
            share.step, samples, "policy", share.metrics, {}, dict(share.options), optional=True
        )
        if self.settings.objective == "answer":
            batch.samples, batch.kind = self._agreeing(share.groups, views), "sft"
            batch.options["sampled"] = samples
        return batch

    def _score_transplanted(self, groups: list[Group], samples: list[TrainSample]) -> None:
        """Put the learner's log-probabilities in place of a told policy's: the KL guard measures the learner."""
        moved = {t.id for group in groups for t in group.trajectories if t.transplanted}
        chosen = [sample for sample in samples if sample.id in moved]
        if sum_over_workers([float(len(chosen))])[0]:  # a forward pass needs all workers
            for sample, own in zip(chosen, self.trainer.model.log_probs(chosen), strict=True):
                if len(own):
                    sample.log_probs[sample.mask] = own

    def _agreeing(self, groups: list[Group], views: list[Views]) -> list[TrainSample]:
        """Up to `evolution.train_samples` episodes of each group that gave its label, as the pictures are.

        With `serve.augmentations` also as corrected: what the policy can do in usual light remains.
        """
        samples, settings, names = [], self.config.evolution, self.config.serve.augmentations
        for group, group_views in zip(groups, views, strict=True):
            candidates = agreeing(group.trajectories, group.question.meta["pseudo_label"])
            rng = random.Random(group.id)
            for trajectory in rng.sample(candidates, min(settings.train_samples, len(candidates))):
                shown = [group_views[trajectory.id]]
                if names:
                    shown.append(
                        corrected(trajectory, shown[0], trajectory.augmentation or rng.choice(names))
                    )
                samples += [from_trajectory(trajectory, pictures) for pictures in shown]
        return samples

    def done(
        self, batch: LearnerBatch, version: ray.ObjectRef | None, metrics: dict[str, float]
    ) -> StepResult:
        if self.rank:
            return StepResult()
        result: StepResult = ray.get(
            self.actor.step_done.remote(batch.step, version, self.incarnation, metrics)
        )
        # A restarted Evolution ignores the update and hands out its approved tasks again: the weights must
        # lose it.
        self.last_state = result.state or {**self.last_state, "base": None}
        return result

    def state(self) -> dict[str, Any]:
        """Origin of the weights and state of the KL controller."""
        return self.last_state

    def end(self) -> None:
        if not self.weights.unpublished:
            return
        version = self.weights.publish(self.trainer, {"evolve/skipped": 1.0})
        if self.rank == 0:
            ray.get(self.actor.candidate.remote(version))
