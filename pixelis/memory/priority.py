"""Priorities for sampling and eviction."""

from __future__ import annotations

import numpy as np

FLOOR = 0.01


def initial(confidence: float, reward: float = 0.0, recency: float = 0.0) -> float:
    """Priority of a new experience: .4 (1 - confidence) + .4 |reward| + .2 recency, at least .01 (Pixelis, experience buffer)."""
    return max(FLOOR, 0.4 * (1 - confidence) + 0.4 * abs(reward) + 0.2 * recency)


def weights(priorities: np.ndarray, retrievals: np.ndarray, successes: np.ndarray) -> np.ndarray:
    """Sampling weights: the priority, times .7 + .3 success rate for experiences that were retrieved before. All [n]."""
    rate = successes / np.maximum(retrievals, 1)
    return np.where(retrievals > 0, priorities * (0.7 + 0.3 * rate), priorities)


def keys(weight: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Exponential arrival times with rates ``weight``, [n]; the ``m`` smallest are a weighted sample without replacement.

    The smallest keys of several shards together are a sample over all shards.
    Source: Efraimidis and Spirakis, Weighted random sampling with a reservoir (2006).
    """
    return rng.exponential(size=len(weight)) / weight
