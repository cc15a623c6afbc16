"""The canary: labelled questions on which no version may regress, before it is promoted and while it serves.

Versions are compared question by question, so that the difficulty of a question cancels. ``PromotionHistory`` keeps the scores of
the promoted versions: a candidate is compared with the served, the best and the first version, or many small falls would add up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pixelis.config import CanaryConfig

Scores = Mapping[str, float | None]
"""Score 0..1 by question id; no answer is 0. None: unscored because a scorer or generator failed; says nothing of the policy."""

MIN_SHARE = 0.9
"""Share of the questions that must be scored for both versions: being unscored on bad questions must not help a candidate."""
MIN_QUESTIONS = 2
MAX_HISTORY = 64
ROUNDING = 1e-9

Reason = Literal["not_worse", "within_tolerance", "fell", "fell_significantly", "traffic_fell_significantly", "too_few_questions"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Comparison of a version with a reference over the ``questions`` scored for both.

    ``mean`` of the paired differences (version - reference), their standard error ``se``, and both accuracies. ``against`` is the
    reference version, if known.
    """

    promote: bool
    reason: Reason
    mean: float
    se: float
    accuracy: float
    reference_accuracy: float
    questions: int
    against: int | None = None

    @property
    def fell(self) -> bool:
        """True when there is evidence of a fall; too few questions are no evidence."""
        return self.reason in ("fell", "fell_significantly", "traffic_fell_significantly")


def compare(candidate: Scores, reference: Scores, config: CanaryConfig, against: int | None = None) -> Decision:
    """Compare a candidate with a reference.

    The candidate is refused when the mean of the paired differences is below ``-tolerance``, when it is negative by ``sigma``
    standard errors or more, or when fewer than MIN_SHARE of the questions (or MIN_QUESTIONS) are scored for both.
    """
    questions = candidate.keys() | reference.keys()
    pairs = [(c, r) for q in sorted(questions) if (c := candidate.get(q)) is not None and (r := reference.get(q)) is not None]
    n = len(pairs)
    accuracies = (statistics.fmean(c for c, _ in pairs), statistics.fmean(r for _, r in pairs)) if n else (0.0, 0.0)
    if n < max(MIN_QUESTIONS, MIN_SHARE * len(questions)):
        return Decision(False, "too_few_questions", 0.0, 0.0, *accuracies, n, against)
    differences = [c - r for c, r in pairs]
    mean = math.fsum(differences) / n
    se = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    reason: Reason
    if mean < -config.tolerance - ROUNDING:
        reason = "fell"
    elif mean < -ROUNDING and mean <= -config.sigma * se:
        reason = "fell_significantly"
    else:
        reason = "not_worse" if mean >= -ROUNDING else "within_tolerance"
    return Decision(reason in ("not_worse", "within_tolerance"), reason, mean, se, *accuracies, n, against)


class PromotionHistory:
    """The promoted versions in order with their scores; the first is the starting policy, the last one serves."""

    def __init__(self, config: CanaryConfig, version: int, scores: Scores):
        self.config = config
        self.entries: list[tuple[int, Scores]] = [(version, dict(scores))]

    @property
    def best(self) -> tuple[int, Scores]:
        """The entry of the highest accuracy; the first of equals."""
        return max(self.entries, key=lambda entry: accuracy(entry[1]))

    def references(self) -> list[tuple[int, Scores]]:
        """The served, the best and the first entry, without duplicates."""
        return list({id(entry[1]): entry for entry in (self.entries[-1], self.best, self.entries[0])}.values())

    def judge_candidate(self, scores: Scores) -> Decision:
        """Compare a candidate with all references; the first refusal, else the decision against the served version."""
        decisions = [compare(scores, reference, self.config, version) for version, reference in self.references()]
        return next((d for d in decisions if not d.promote), decisions[0])

    def judge_served(self, scores: Scores) -> Decision:
        """Compare the served version's new scores with all references; roll back when ``Decision.fell``."""
        decisions = [compare(scores, reference, self.config, version) for version, reference in self.references()]
        return next((d for d in decisions if d.fell), decisions[0])

    def promote(self, version: int, scores: Scores | None = None) -> None:
        """Record that ``version`` serves, with the scores of its canary; None for a forced promotion keeps the last scores."""
        self.entries.append((version, dict(scores) if scores is not None else self.entries[-1][1]))
        if len(self.entries) > MAX_HISTORY:
            best = self.entries.index(self.best)
            del self.entries[1 if best != 1 else 2]

    def roll_back(self, version: int) -> None:
        """Record that ``version`` serves again and forget later versions; one not in the history gets the first scores."""
        indices = [i for i, (promoted, _) in enumerate(self.entries) if promoted == version]
        self.entries = self.entries[: indices[-1] + 1] if indices else [self.entries[0], (version, self.entries[0][1])]

    def state(self) -> dict[str, Any]:
        """State for ``restore``, as JSON takes it."""
        return {"line": [[version, dict(scores)] for version, scores in self.entries]}

    @classmethod
    def restore(cls, config: CanaryConfig, state: dict[str, Any]) -> PromotionHistory:
        """The history with this ``state``."""
        history = cls(config, 0, {})
        history.entries = [(int(version), scores) for version, scores in state["line"]]
        return history


def accuracy(scores: Scores) -> float:
    """Mean of the known scores; 0 when there is none."""
    scored = [score for score in scores.values() if score is not None]
    return math.fsum(scored) / len(scored) if scored else 0.0
