"""Normalises reward terms by running statistics. Source: Pixelis, arXiv 2603.25091."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pixelis import config


class Normaliser:
    """z-scores by Welford's running mean and deviation, which change only in ``commit``.

    The scores of a step therefore do not depend on the order of its groups, and a group scored twice counts once.
    """

    def __init__(self, settings: config.NormaliseConfig):
        self.settings = settings
        self.statistics: dict[str, tuple[int, float, float]] = dict.fromkeys(settings.terms, (0, 0.0, 0.0))
        self.pending: dict[str, dict[str, list[float]]] = {}

    def __call__(self, name: str, value: float) -> float:
        """(value - mean) / deviation, clipped; unchanged for other terms and before ``min_samples`` values."""
        count, mean, squares = self.statistics.get(name, (0, 0.0, 0.0))
        if count < self.settings.min_samples:
            return value
        deviation = max(math.sqrt(squares / count), self.settings.min_std)
        return max(-self.settings.clip, min(self.settings.clip, (value - mean) / deviation))

    def observe(self, group: str, values: Mapping[str, Sequence[float]]) -> None:
        """Store the raw values of a group's terms for the next ``commit``."""
        self.pending[group] = {name: list(values.get(name, ())) for name in self.statistics}

    def commit(self) -> None:
        """Add the observed values in the order of group ids, so that the same groups give the same statistics bit by bit."""
        for _, values in sorted(self.pending.items()):
            for name, observed in values.items():
                for value in observed:
                    self.statistics[name] = self._updated(*self.statistics[name], value)
        self.pending.clear()

    def _updated(self, count: int, mean: float, squares: float, value: float) -> tuple[int, float, float]:
        if self.settings.freeze_after and count >= self.settings.freeze_after:
            return count, mean, squares
        count += 1
        before, mean = mean, mean + (value - mean) / count
        return count, mean, squares + (value - before) * (value - mean)

    def state_dict(self) -> dict[str, Any]:
        """Statistics as JSON takes them, without uncommitted values."""
        return {name: list(values) for name, values in self.statistics.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict``; terms that it lacks start from nothing."""
        for name in self.statistics:
            if name in state:
                count, mean, squares = state[name]
                self.statistics[name] = (int(count), float(mean), float(squares))
        self.pending.clear()

    def metrics(self) -> dict[str, float]:
        """Mean and deviation of each term."""
        metrics = {}
        for name, (count, mean, squares) in self.statistics.items():
            metrics[f"normalise/{name}_mean"] = mean
            metrics[f"normalise/{name}_std"] = math.sqrt(squares / count) if count else 0.0
        return metrics
