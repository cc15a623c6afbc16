"""Confidence intervals and paired differences, with scipy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LEVEL = 0.95
RESAMPLES = 10_000


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson score interval of a proportion (JASA 1927), within 0..1; (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    from scipy.stats import binomtest  # scipy.stats takes a second to import

    interval = binomtest(successes, n).proportion_ci(confidence_level=LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap_mean(values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Percentile bootstrap interval of a mean of independent values (Efron, 1979).

    The bias-corrected interval is undefined if all values are equal.
    """
    from scipy.stats import bootstrap

    interval = bootstrap(
        (np.asarray(values, dtype=np.float64),),
        np.mean,
        n_resamples=resamples,
        batch=500,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def paired_bootstrap(
    a: Sequence[float] | Mapping[str, float], b: Sequence[float] | Mapping[str, float], seed: int = 0
) -> dict[str, float | int | list[float]]:
    """Mean of a - b over the same questions with its 95 % bootstrap interval: `{"mean", "ci95", "n"}`.

    Mappings (question id -> score) are compared on shared keys. Questions are resampled with both scores, so
    their difficulty cancels.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        pairs = [(a[key], b[key]) for key in sorted(a.keys() & b.keys())]
    else:
        pairs = list(zip(a, b, strict=True))  # type: ignore[arg-type]
    differences = [left - right for left, right in pairs]
    low, high = bootstrap_mean(differences, seed)
    return {"mean": float(np.mean(differences)), "ci95": [low, high], "n": len(differences)}


def paired_p(differences: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> float:
    """Two-sided p of paired differences under random signs.

    Exact where all differences but 0 have one size (McNemar's test); else by resampling.
    """
    from scipy.stats import binomtest, permutation_test

    data = np.asarray(differences, dtype=np.float64)
    changed = data[data != 0]
    if not changed.size:
        return 1.0
    if np.ptp(np.abs(changed)) == 0:
        return float(binomtest(int((changed > 0).sum()), changed.size).pvalue)
    result = permutation_test(
        (data,),
        lambda values, axis: values.mean(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples - 1,
        batch=500,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def compare(a: Mapping[str, float], b: Mapping[str, float], seed: int = 0) -> dict[str, Any] | None:
    """`paired_bootstrap` of the shared questions, with `p` of `paired_p`; None for fewer than two."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) < 2:
        return None
    return {**paired_bootstrap(a, b, seed), "p": paired_p([a[key] - b[key] for key in shared], seed)}
