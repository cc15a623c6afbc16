"""Safeguards of updates from traffic: steps that go too far are undone, and a moving average is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pixelis.policy.learner_model import LearnerModel
from pixelis.policy.samples import TrainSample


class StepGuard:
    """Copies weights and moments before a step, and restores them if the step's KL exceeds `limit`."""

    def __init__(self, model: LearnerModel, limit: float):
        self.model, self.limit = model, limit
        self.weights, self.moments = model.zero.weights(), model.zero.moments()

    def check(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Undo the step, bit for bit, if it went too far; returns metrics. samples: of the behaviour policy."""
        divergence = self.model.behaviour_kl(samples)
        is_beyond = not divergence <= self.limit  # also if it is not a number
        if is_beyond:
            self.model.zero.set_weights(self.weights)
            self.model.zero.set_moments(self.moments)
        return {"evolve/kl": divergence, "evolve/skipped": float(is_beyond)}


def moving_average(
    average: Mapping[str, np.ndarray], newest: Mapping[str, np.ndarray], decay: float
) -> dict[str, np.ndarray]:
    """decay * average + (1 - decay) * newest of every tensor, float32."""
    if not decay:
        return dict(newest)
    old_share, new_share = np.float32(decay), np.float32(1.0 - decay)
    return {name: old_share * average[name] + new_share * new for name, new in newest.items()}
