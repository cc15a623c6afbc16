"""The confidence gate: which verdicts may teach."""

from __future__ import annotations

from pixelis.config import Evolution
from pixelis.evolution.vote import INSUFFICIENT, NO_ANSWER, TIE
from pixelis.records import Verdict

CLOSED = frozenset({TIE, NO_ANSWER, INSUFFICIENT})


def gate(verdict: Verdict, config: Evolution) -> bool:
    """True when the verdict may become an update: learning on, a clear winner, confidence >= ``config.gate`` (inclusive).

    A tie or too few votes never teach, whatever the threshold: the pseudo-label would be an accident of order.
    """
    return config.enabled and verdict.answer is not None and verdict.reason not in CLOSED and verdict.confidence >= config.gate
