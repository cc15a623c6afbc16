"""Priorities for sampling and eviction."""

from __future__ import annotations

import numpy as np


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
