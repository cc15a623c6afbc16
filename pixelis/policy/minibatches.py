"""Several optimizer steps on one batch: which samples each step takes, and the metrics of all of them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

SUMMED = ("learner/tokens", "learner/sequences", "learner/trained_sequences", "learner/micro_batches", "learner/seconds")


def minibatch_indices(samples: int, minibatches: int, epochs: int, seed: Sequence[int]) -> Iterator[list[int]]:
    """Indices of the samples of each optimizer step: ``epochs`` passes of ``minibatches`` steps each.

    The first pass deals the samples out in turn; later ones shuffle them by ``seed`` and the number of the pass.
    """
    for epoch in range(epochs):
        order = list(range(samples)) if not epoch else np.random.default_rng([*seed, epoch]).permutation(samples).tolist()
        for part in range(minibatches):
            yield order[part::minibatches]


def combine_metrics(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as one: counts are summed, largest values and running counts stay, others are means.

    A step without a trained sample has fewer metrics and does not count in the means of those it lacks.
    """
    out = {}
    for name in {name: None for metrics in steps for name in metrics}:
        values = [metrics[name] for metrics in steps if name in metrics]
        if name in SUMMED or name.startswith("learner/dropped_"):
            out[name] = sum(values)
        elif name.endswith("_max") or name == "learner/skipped":
            out[name] = max(values)
        else:
            out[name] = sum(values) / len(values)
    return out
