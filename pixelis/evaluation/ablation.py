"""Statistics of an ablation: arms against a reference arm.

Tests over questions ask whether these runs would differ on other questions; tests over seeds, whether other
runs of the same arms would.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pixelis.config.ablation import Metric
from pixelis.evaluation.metrics import operation_counts
from pixelis.evaluation.statistics import LEVEL, bootstrap_mean, paired_bootstrap, paired_p
from pixelis.records import Group, Trajectory

ALPHA = 1 - LEVEL
POWER = 0.8
TINY = 1e-12
"""Smaller deviations are rounding errors."""


def _accuracy(trajectories: Sequence[Trajectory]) -> list[float]:
    return [t.rewards["accuracy"] for t in trajectories if "accuracy" in t.rewards]


SCORES: dict[Metric, Callable[[Sequence[Trajectory]], list[float]]] = {
    "accuracy": _accuracy,
    "pass": lambda trajectories: [float(max(scores) > 0.5)] if (scores := _accuracy(trajectories)) else [],
    "rapr": lambda trajectories: [float(t.operations_ok > 0) for t in trajectories],
    "turns": lambda trajectories: [float(t.policy_turns) for t in trajectories],
    "calls": lambda trajectories: [float(operation_counts(t)[0]) for t in trajectories],
}
"""Metric -> its values of the episodes of a question; none if the question is unscored."""


def question_scores(groups: Mapping[str, Group]) -> dict[str, dict[str, float]]:
    """Metric -> question -> mean over its episodes; unscored questions are left out."""
    return {
        metric: {
            name: statistics.fmean(values)
            for name, group in groups.items()
            if (values := score(group.trajectories))
        }
        for metric, score in SCORES.items()
    }


@dataclass(frozen=True)
class Scores:
    """``values[arm, seed, question]`` of the seeds and questions that every arm has."""

    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    questions: tuple[str, ...]
    values: np.ndarray


def tabulate(runs: Mapping[str, Mapping[int, Mapping[str, float]]]) -> Scores:
    """Arrange ``runs`` (arm -> seed -> question -> score), without what a test cannot pair.

    Raises ValueError if fewer than two questions remain.
    """
    arms = tuple(arm for arm, by_seed in runs.items() if by_seed)
    seeds = [seed for seed in (runs[arms[0]] if arms else ()) if all(seed in runs[arm] for arm in arms)]
    scored = [runs[arm][seed].keys() for arm in arms for seed in seeds]
    questions = sorted(set.intersection(*map(set, scored))) if scored else []
    if len(questions) < 2:
        raise ValueError(f"the arms share {len(seeds)} seeds and {len(questions)} scored questions")
    values = np.array(
        [[[runs[arm][seed][q] for q in questions] for seed in seeds] for arm in arms], dtype=np.float64
    )
    return Scores(arms, tuple(seeds), tuple(questions), values)


def summarise_arms(scores: Scores) -> list[dict[str, Any]]:
    """For each arm: mean with its bootstrap interval over questions, means by seed and their deviation."""
    rows = []
    for arm, values in zip(scores.arms, scores.values, strict=True):
        by_seed = values.mean(axis=1)
        rows.append(
            {
                "arm": arm,
                "mean": float(values.mean()),
                "ci95": list(bootstrap_mean(values.mean(axis=0).tolist())),
                "by_seed": dict(zip(map(str, scores.seeds), by_seed.tolist(), strict=True)),
                "std": float(by_seed.std(ddof=1)) if len(by_seed) > 1 else None,
            }
        )
    return rows


def compare(scores: Scores, reference: str) -> list[dict[str, Any]]:
    """Each other arm minus the reference, with Holm's correction.

    ``p``: permutation test over questions, ``p_seeds``: test over seeds (None for one seed). ``effect``:
    Cohen's d.
    """
    base = scores.values[scores.arms.index(reference)].mean(axis=0)
    others = [i for i, arm in enumerate(scores.arms) if arm != reference]
    rows: list[dict[str, Any]] = []
    for i in others:
        arm = scores.values[i].mean(axis=0)
        difference = paired_bootstrap(arm.tolist(), base.tolist())
        seeds = seed_test(scores, scores.arms[i], reference)
        rows.append(
            {
                "arm": scores.arms[i],
                "difference": difference["mean"],
                "ci95": difference["ci95"],
                "ci95_seeds": seeds[1] if seeds else None,
                "effect": cohen_d(arm - base),
                "p": paired_p((arm - base).tolist()),
                "p_seeds": seeds[0] if seeds else None,
            }
        )
    for key in ("p", "p_seeds"):
        known = [row[key] for row in rows if row[key] is not None]
        for row, corrected in zip(rows, holm(known) if known else [None] * len(rows), strict=True):
            row[f"{key}_holm"] = corrected
    for row in rows:
        row["verdict"] = verdict(row)
    return rows


def verdict(row: Mapping[str, Any]) -> str:
    if row["p_holm"] > ALPHA:
        return "no difference seen"
    direction = "higher" if row["difference"] > 0 else "lower"
    return (
        direction
        if row["p_seeds_holm"] is not None and row["p_seeds_holm"] <= ALPHA
        else f"{direction} in these runs"
    )


def holm(values: Sequence[float]) -> list[float]:
    """p values corrected for their number, in the given order (Holm, Scand. J. Statistics 1979)."""
    order = sorted(range(len(values)), key=values.__getitem__)
    corrected, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, values[index] * (len(values) - rank)))
        corrected[index] = largest
    return corrected


def cohen_d(differences: np.ndarray) -> float | None:
    """Mean of paired differences in their standard deviations; 0 without any difference."""
    deviation = float(differences.std(ddof=1))
    if deviation > TINY:
        return float(differences.mean()) / deviation
    return 0.0 if abs(differences.mean()) <= TINY else None


def seed_error(scores: Scores) -> tuple[float, int] | None:
    """Standard error of the difference of two arms over seeds, and its degrees of freedom; None for one seed.

    From the residuals of a two-way analysis of variance (arm, seed) without replication.
    """
    arms, seeds = len(scores.arms), len(scores.seeds)
    if arms < 2 or seeds < 2:
        return None
    runs = scores.values.mean(axis=2)
    residuals = runs - runs.mean(axis=1, keepdims=True) - runs.mean(axis=0, keepdims=True) + runs.mean()
    freedom = (arms - 1) * (seeds - 1)
    return math.sqrt(2 * float((residuals**2).sum()) / freedom / seeds), freedom


def seed_test(scores: Scores, arm: str, reference: str) -> tuple[float, list[float]] | None:
    """Two-sided p and 95 % interval of the difference of two arms over seeds; None for one seed."""
    if (error := seed_error(scores)) is None:
        return None
    from scipy.stats import t

    deviation, freedom = error
    means = dict(zip(scores.arms, scores.values.mean(axis=(1, 2)), strict=True))
    difference = float(means[arm] - means[reference])
    half = float(t.ppf(1 - ALPHA / 2, freedom)) * deviation
    if deviation <= TINY:
        return float(abs(difference) <= TINY), [difference, difference]
    return float(2 * t.sf(abs(difference) / deviation, freedom)), [difference - half, difference + half]


def detectable(scores: Scores) -> float | None:
    """Smallest difference that the test over seeds finds with a probability of `POWER`; None for one seed."""
    if (error := seed_error(scores)) is None:
        return None
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    deviation, freedom = error
    if deviation <= TINY:
        return 0.0
    critical = float(t.ppf(1 - ALPHA / (len(scores.arms) - 1) / 2, freedom))

    def missing(shift: float) -> float:
        return float(nct.sf(critical, freedom, shift)) - POWER

    return float(brentq(missing, 0.0, 10 * critical + 10)) * deviation


def mean_curve(runs: Sequence[Mapping[float, float]]) -> list[tuple[float, float, float, float]]:
    """(step, mean, lowest, highest) over runs (step -> value), for the steps that all of them have."""
    steps = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    columns = {step: [run[step] for run in runs] for step in steps}
    return [(step, statistics.fmean(values), min(values), max(values)) for step, values in columns.items()]
