"""The canary: labelled questions that a version must not fall on, before it is promoted and while it serves.

Versions are compared question by question, so that what makes a question hard for both cancels. ``Watch`` keeps the answers of
the promoted versions: a candidate is held against the served one, the best and the first, or many small falls would add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pixelis.config import CanaryConfig

Scores = Mapping[str, float | None]
"""Score 0..1 by question id; no answer is 0. None: unscored (a scorer or generator failed), which says nothing of the policy."""

LEAST_SHARE = 0.9
"""Share of the questions that both versions must have a score for: a candidate cannot pass by being unscored where it is bad."""
LEAST = 2
KEPT = 64
ROUNDING = 1e-9

Reason = Literal["not_worse", "within_tolerance", "fell", "fell_significantly", "too_few_questions"]


@dataclass(frozen=True, slots=True)
class Decision:
    """``mean`` of candidate - reference over the ``questions`` both have, ``se`` its standard error, accuracies over the same.

    ``against`` is the version it was held against, where that is known.
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
        """True when there is evidence of a fall; too few questions are none."""
        return self.reason in ("fell", "fell_significantly")


def compare(candidate: Scores, reference: Scores, config: CanaryConfig, against: int | None = None) -> Decision:
    """May ``candidate`` serve in the place of ``reference``?

    No when the mean of the paired differences is below ``-tolerance``, when it is below 0 by ``sigma`` of its standard errors or
    more, or when fewer than LEAST_SHARE of the questions (or fewer than two) have a score in both.
    """
    asked = candidate.keys() | reference.keys()
    pairs = [(c, r) for q in sorted(asked) if (c := candidate.get(q)) is not None and (r := reference.get(q)) is not None]
    n = len(pairs)
    if n < max(LEAST, LEAST_SHARE * len(asked)):
        accuracy = sum(c for c, _ in pairs) / n if n else 0.0
        return Decision(False, "too_few_questions", 0.0, 0.0, accuracy, sum(r for _, r in pairs) / n if n else 0.0, n, against)
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
    promote = reason in ("not_worse", "within_tolerance")
    return Decision(promote, reason, mean, se, math.fsum(c for c, _ in pairs) / n, math.fsum(r for _, r in pairs) / n, n, against)


class Watch:
    """The versions promoted one after another and what they answered: the first is the starting policy, the last one serves."""

    def __init__(self, config: CanaryConfig, version: int, scores: Scores):
        self.config = config
        self.line: list[tuple[int, Scores]] = [(version, dict(scores))]

    @property
    def served(self) -> int:
        """The version promoted last."""
        return self.line[-1][0]

    @property
    def best(self) -> int:
        """The promoted version of the highest accuracy; of equal ones the first."""
        return max(self.line, key=lambda entry: accuracy(entry[1]))[0]

    def references(self) -> list[tuple[int, Scores]]:
        """What others are held against: the served version, the best, the first; each once."""
        chosen = (self.line[-1], max(self.line, key=lambda entry: accuracy(entry[1])), self.line[0])
        return list({id(scores): (version, scores) for version, scores in chosen}.values())

    def judge(self, scores: Scores) -> Decision:
        """May a candidate with these scores be promoted? The first refusal, else the decision against the served version."""
        decisions = [compare(scores, reference, self.config, version) for version, reference in self.references()]
        return next((d for d in decisions if not d.promote), decisions[0])

    def fell(self, scores: Scores) -> Decision:
        """How the served version does now, against its own promotion and its ancestors: roll back when ``Decision.fell``."""
        decisions = [compare(scores, reference, self.config, version) for version, reference in self.references()]
        return next((d for d in decisions if d.fell), decisions[0])

    def promoted(self, version: int, scores: Scores | None = None) -> None:
        """``version`` serves from now on. ``scores`` are what it was promoted with.

        None for one that is promoted on somebody's word, without a canary: what served before it stays the measure.
        """
        self.line.append((version, dict(scores) if scores is not None else self.line[-1][1]))
        if len(self.line) > KEPT:
            best = max(range(len(self.line)), key=lambda i: accuracy(self.line[i][1]))
            del self.line[1 if best != 1 else 2]

    def rolled_back(self, version: int) -> None:
        """``version`` serves again: those promoted after it are forgotten, and with them what they were best at.

        A version that is not in the line any more is held against the first one.
        """
        places = [i for i, (promoted, _) in enumerate(self.line) if promoted == version]
        self.line = self.line[: places[-1] + 1] if places else [self.line[0], (version, self.line[0][1])]

    def state(self) -> dict[str, Any]:
        """What a restart needs to go on, as JSON takes it."""
        return {"line": [[version, dict(scores)] for version, scores in self.line]}

    @classmethod
    def restore(cls, config: CanaryConfig, state: dict[str, Any]) -> Watch:
        """The watch that ``state`` came from."""
        watch = cls(config, 0, {})
        watch.line = [(int(version), scores) for version, scores in state["line"]]
        return watch


def accuracy(scores: Scores) -> float:
    """Mean score of the scored questions; 0 when there is none."""
    known = [score for score in scores.values() if score is not None]
    return math.fsum(known) / len(known) if known else 0.0
