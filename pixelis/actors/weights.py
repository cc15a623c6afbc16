"""Publishes the learner's weights as policy versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle

if TYPE_CHECKING:
    from pixelis.policy.train_step import Trainer


class WeightPublisher:
    """Publishes the weights after every ``every``-th batch to a PolicyStore, if there is one.

    With ``promote`` false, versions are candidates: they are not served before their promotion.
    """

    def __init__(self, store: ActorHandle | None, stage: str, every: int = 1, promote: bool = True):
        self.store, self.stage, self.every, self.promote = store, stage, every, promote

    def due(self, trainer: Trainer, metrics: dict[str, float]) -> bool:
        """Whether to publish the weights after this step; the same on all workers."""
        return trainer.batches % self.every == 0

    def publish(self, trainer: Trainer, metrics: dict[str, float], restart: bool = False) -> ray.ObjectRef | None:
        """Publish if due; returns a reference to the version number on the first worker, otherwise None.

        ``restart``: the learner starts here, so later versions are withdrawn.
        """
        if self.store is None or not (restart or self.due(trainer, metrics)):
            return None
        weights = trainer.served()
        if not trainer.is_first:
            return None
        return self.store.publish.remote(weights, self.stage, trainer.batches, metrics, self.promote, restart)


class CandidatePublisher(WeightPublisher):
    """Publishes every ``every``-th update as a candidate."""

    def __init__(self, store: ActorHandle, every: int):
        super().__init__(store, "evolve", every, promote=False)
        self.unpublished = 0

    def due(self, trainer: Trainer, metrics: dict[str, float]) -> bool:
        """Also due after a skipped update: the updates before it have used up the allowed KL to the served policy."""
        skipped = bool(metrics.get("evolve/skipped"))
        self.unpublished += not skipped
        is_due = self.unpublished >= self.every or (skipped and self.unpublished > 0)
        if is_due:
            self.unpublished = 0
        return is_due
