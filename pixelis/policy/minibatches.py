"""Several optimizer steps on one batch: the samples of each step, and metrics over all steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

SUMMED = ("learner/tokens", "learner/sequences", "learner/trained_sequences", "learner/micro_batches", "learner/seconds")


def minibatch_indices(samples: int, minibatches: int, epochs: int, seed: Sequence[int]) -> Iterator[list[int]]:
    """Indices of the samples of each optimizer step: `epochs` passes of `minibatches` steps each.

    The first pass takes the samples in order; later passes shuffle them by `seed` and the number of the pass.
    """
    for epoch in range(epochs):
        order = list(range(samples)) if not epoch else np.random.default_rng([*seed, epoch]).permutation(samples).tolist()
        for minibatch in range(minibatches):
            yield order[minibatch::minibatches]


def combine_metrics(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics over several optimizer steps: sums of counts, the largest of maxima and running counts, means of the rest.

    A step without a trained sample has fewer metrics and does not count in their means.
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
