"""The canary: labelled questions on which no version may regress, before promotion and while it serves.

Versions are compared question by question. A promotion needs evidence: a non-inferiority test.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pixelis.config import CanaryConfig

Scores = Mapping[str, float | None]
"""Score 0..1 by question id; None: a scorer or generator failed, which says nothing of the policy."""

MIN_SHARE = 0.9
"""Share of the questions that must be scored for both versions: failing on bad ones must not help."""
MIN_QUESTIONS = 2
PSEUDO_PAIRS = 2
SIGMA = 2.0
"""Standard errors of a paired difference that are evidence of a fall or a gain."""
MAX_HISTORY = 64
ROUNDING = 1e-9

Reason = Literal[
    "better",
    "not_worse",
    "inconclusive",
    "blind",
    "fell",
    "fell_significantly",
    "traffic_fell_significantly",
    "too_few_questions",
    "does_not_look",
]


@dataclass(frozen=True, slots=True)
class Decision:
    """Comparison of a version with the reference ``against`` over the ``questions`` scored for both.

    ``mean`` of the paired differences (version - reference), their standard error ``se``, and a lower
    ``bound`` of the true mean.
    """

    promote: bool
    reason: Reason
    mean: float
    se: float
    bound: float
    accuracy: float
    reference_accuracy: float
    questions: int
    against: int | None = None

    @property
    def fell(self) -> bool:
        return self.reason in ("fell", "fell_significantly", "traffic_fell_significantly")

    @property
    def waits(self) -> bool:
        """Whether more evidence may follow: the version is neither promoted nor withdrawn."""
        return self.reason in ("inconclusive", "blind")


def compare(
    candidate: Scores, reference: Scores, config: CanaryConfig, against: int | None = None, look: int = 1
) -> Decision:
    """Compare a candidate with a reference; ``look`` counts the candidates since the last promotion.

    A fall: the mean is below ``-tolerance``, or negative by at least SIGMA standard errors. A promotion needs
    a lower bound of the mean of at least ``-tolerance``; if the reference gets so little right that no candidate
    can fall by that much, as without the tools of an outside agent, only a better one is promoted.
    """
    questions = candidate.keys() | reference.keys()
    pairs = [
        (c, r)
        for q in sorted(questions)
        if (c := candidate.get(q)) is not None and (r := reference.get(q)) is not None
    ]
    n = len(pairs)
    accuracies = (
        (statistics.fmean(c for c, _ in pairs), statistics.fmean(r for _, r in pairs)) if n else (0.0, 0.0)
    )
    if n < max(MIN_QUESTIONS, MIN_SHARE * len(questions)):
        return Decision(False, "too_few_questions", 0.0, 0.0, -1.0, *accuracies, n, against)
    differences = [c - r for c, r in pairs]
    mean = math.fsum(differences) / n
    se = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    # Half a pair won and half a pair lost in addition, and one pair equal: a few changed answers, or none,
    # would otherwise have a standard error of about 0 (Agresti and Min 2005, doi 10.1002/sim.1781).
    m = n + PSEUDO_PAIRS
    cautious_mean = math.fsum(differences) / m
    cautious_se = math.sqrt(
        max((math.fsum(d * d for d in differences) + 1.0) / m - cautious_mean**2, 0.0) / m
    )
    bound = min(cautious_mean - critical_value(config.risk, look) * cautious_se, mean)
    reason: Reason
    if mean < -config.tolerance - ROUNDING:
        reason = "fell"
    elif mean < -ROUNDING and mean <= -SIGMA * se:
        reason = "fell_significantly"
    elif bound < -config.tolerance - ROUNDING:
        reason = "inconclusive"
    elif cautious_mean >= SIGMA * cautious_se:
        reason = "better"
    else:
        reason = "blind" if accuracies[1] <= config.tolerance < 1 else "not_worse"
    return Decision(reason in ("better", "not_worse"), reason, mean, se, bound, *accuracies, n, against)


def critical_value(risk: float, look: int) -> float:
    """Standard errors by which look ``look`` (from 1) must exclude the tolerance; 0 for a risk of 1.

    Look k spends ``risk`` / (k (k + 1)): together they spend ``risk``, however many candidates are tested.
    """
    return statistics.NormalDist().inv_cdf(1.0 - risk / (look * (look + 1))) if risk < 1 else 0.0


def least_questions(config: CanaryConfig) -> int:
    """Questions with which an unchanged candidate is promoted at the first look."""
    if config.tolerance <= ROUNDING:  # only a better one is
        return MIN_QUESTIONS
    return max(MIN_QUESTIONS, math.ceil(critical_value(config.risk, 1) / config.tolerance) - PSEUDO_PAIRS)


class PromotionHistory:
    """The promoted versions with their scores, from the starting policy to the one that serves.

    A version is compared with the served, the best and the first one, or small falls would add up.
    """

    def __init__(self, config: CanaryConfig, version: int, scores: Scores):
        self.config = config
        self.entries: list[tuple[int, Scores]] = [(version, dict(scores))]
        self.looks = 0
        """Candidates judged since the last promotion."""

    @property
    def best(self) -> tuple[int, Scores]:
        return max(self.entries, key=lambda entry: accuracy(entry[1]))

    def references(self) -> list[tuple[int, Scores]]:
        return list(
            {id(entry[1]): entry for entry in (self.entries[-1], self.best, self.entries[0])}.values()
        )

    def judge_candidate(self, scores: Scores) -> Decision:
        """The first fall against a reference, else the first lack of evidence, else the served version's."""
        self.looks += 1
        decisions = self._compare(scores, self.looks)
        fallen = next((d for d in decisions if d.fell), None)
        return fallen or next((d for d in decisions if not d.promote), decisions[0])

    def judge_served(self, scores: Scores) -> Decision:
        """The first fall of the served version's new scores, else the comparison with its old ones."""
        decisions = self._compare(scores)
        return next((d for d in decisions if d.fell), decisions[0])

    def _compare(self, scores: Scores, look: int = 1) -> list[Decision]:
        return [compare(scores, known, self.config, version, look) for version, known in self.references()]

    def promote(self, version: int, scores: Scores | None = None) -> None:
        """Record that ``version`` serves; None, for a forced promotion, repeats the last scores."""
        self.looks = 0
        self.entries.append((version, dict(scores) if scores is not None else self.entries[-1][1]))
        if len(self.entries) > MAX_HISTORY:
            best = self.entries.index(self.best)
            del self.entries[1 if best != 1 else 2]

    def roll_back(self, version: int) -> None:
        """Record that ``version`` serves again; one not in the history gets the first scores."""
        self.looks = 0
        indices = [i for i, (promoted, _) in enumerate(self.entries) if promoted == version]
        self.entries = (
            self.entries[: indices[-1] + 1] if indices else [self.entries[0], (version, self.entries[0][1])]
        )

    def state(self) -> dict[str, Any]:
        return {"line": [[version, dict(scores)] for version, scores in self.entries], "looks": self.looks}

    @classmethod
    def restore(cls, config: CanaryConfig, state: dict[str, Any]) -> PromotionHistory:
        history = cls(config, 0, {})
        history.entries = [(int(version), scores) for version, scores in state["line"]]
        history.looks = state.get("looks", 0)
        return history


def accuracy(scores: Scores) -> float:
    """Mean of the known scores; 0 when there is none."""
    scored = [score for score in scores.values() if score is not None]
    return math.fsum(scored) / len(scored) if scored else 0.0
