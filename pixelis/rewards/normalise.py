"""Normalises reward terms by running statistics. Source: Pixelis, arXiv 2603.25091."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

MIN_SAMPLES = 10
MIN_STD = 0.1
CLIP = 3.0


class Normaliser:
    """z-scores of ``terms`` by Welford's running mean and deviation, which change only in ``commit``."""

    def __init__(self, terms: Sequence[str]):
        self.statistics: dict[str, tuple[int, float, float]] = dict.fromkeys(terms, (0, 0.0, 0.0))
        """(count, mean, sum of squared deviations) by term."""
        self.pending: dict[str, dict[str, list[float]]] = {}

    def __call__(self, name: str, value: float) -> float:
        """(value - mean) / deviation, clipped; unchanged before ``MIN_SAMPLES`` values."""
        count, mean, squares = self.statistics.get(name, (0, 0.0, 0.0))
        if count < MIN_SAMPLES:
            return value
        deviation = max(math.sqrt(squares / count), MIN_STD)
        return max(-CLIP, min(CLIP, (value - mean) / deviation))

    def observe(self, group: str, values: Mapping[str, Sequence[float]]) -> None:
        """Store a group's raw values for the next ``commit``."""
        self.pending[group] = {name: list(values.get(name, ())) for name in self.statistics}

    def commit(self) -> None:
        """Add the observed values in the order of group ids, for the same statistics bit by bit."""
        for _, values in sorted(self.pending.items()):
            for name, observed in values.items():
                count, mean, squares = self.statistics[name]
                for value in observed:
                    count += 1
                    before, mean = mean, mean + (value - mean) / count
                    squares += (value - before) * (value - mean)
                self.statistics[name] = count, mean, squares
        self.pending.clear()

    def state_dict(self) -> dict[str, Any]:
        return {name: list(values) for name, values in self.statistics.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Terms that the state lacks start from nothing."""
        for name in self.statistics:
            if name in state:
                count, mean, squares = state[name]
                self.statistics[name] = (int(count), float(mean), float(squares))
        self.pending.clear()

    def metrics(self) -> dict[str, float]:
        metrics = {}
        for name, (count, mean, squares) in self.statistics.items():
            metrics[f"normalise/{name}_mean"] = mean
            metrics[f"normalise/{name}_std"] = math.sqrt(squares / count) if count else 0.0
        return metrics
