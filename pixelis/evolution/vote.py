"""The vote: k answers to one prompt become one verdict with its provenance (TTRL, arXiv 2504.16084, majority label)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pixelis.records import Verdict, Vote
from pixelis.rewards.scorers import canonical

TIE = "tie"
NO_ANSWER = "no_answer"
INSUFFICIENT = "insufficient_votes"
MIN_VOTES = 3
"""Votes below which agreement is no evidence: one sample always agrees with itself."""


def agrees(answer: str | None, label: str) -> bool:
    """True when ``answer`` says the same as ``label``; the equality that rewards use, so that votes and rewards cannot differ."""
    return answer is not None and canonical(answer) == canonical(label)


def majority(answers: Sequence[str | None]) -> Verdict:
    """The answer that most samples gave, spelled as the first of them spelled it; equality is ``canonical``.

    ``confidence`` is its share of *all* samples: one without an answer (None, or blank) votes for nothing but counts. A tie
    reports the first of the tied with its share and reason ``tie``; fewer than MIN_VOTES votes report half the share and
    reason ``insufficient_votes``; no vote at all abstains (answer None, confidence 0). The gate lets none of these teach.
    """
    votes = [Vote(answer=answer) for answer in answers]

    def verdict(answer: str | None, confidence: float, reason: str = "") -> Verdict:
        return Verdict(answer=answer, confidence=confidence, strategy="majority", votes=votes, reason=reason)

    spelled: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for answer in answers:
        if answer is not None and (key := canonical(answer)):
            spelled.setdefault(key, answer)
            counts[key] += 1
    if not counts:
        return verdict(None, 0.0, NO_ANSWER)
    (winner, most), *others = counts.most_common(2)  # stable: the first of equal counts is the first seen
    share = most / len(answers)
    if others and others[0][1] == most:
        return verdict(spelled[winner], share, TIE)
    if counts.total() < MIN_VOTES:
        return verdict(spelled[winner], share / 2, INSUFFICIENT)
    return verdict(spelled[winner], share)
