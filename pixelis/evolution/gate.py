"""The confidence gate: which verdicts may teach, how strongly, how often, and which go to a person first."""

from __future__ import annotations

import hashlib
from collections import deque

from pixelis.config import EvolutionConfig
from pixelis.evolution.vote import CLOSED
from pixelis.records import Verdict

ROUNDING = 1e-9
"""Confidence is a product of fractions: what falls short by less than this reaches the gate."""


def gate(verdict: Verdict, config: EvolutionConfig) -> bool:
    """True when the verdict may become an update: learning on, a clear winner, confidence >= ``config.gate`` (inclusive).

    A verdict with a reason in ``CLOSED`` never teaches, whatever the threshold: the pseudo-label would be an accident.
    """
    return (
        config.enabled
        and verdict.answer is not None
        and verdict.reason not in CLOSED
        and verdict.confidence >= config.gate - ROUNDING
    )


def learning_rate(confidence: float, config: EvolutionConfig) -> float:
    """Rate of an update whose tasks have this mean confidence, within ``lr_min``..``lr``.

    ``lr_by`` fixed: ``lr``. confidence: lr x (1 - confidence), Pixelis' rule. Fixed is the default because the gate lets only
    confident verdicts in, where that rule leaves at most .3 lr, and because a group's advantages already shrink to nothing as its
    samples agree: the rule discounts the same thing twice.
    """
    rate = config.lr if config.lr_by == "fixed" else config.lr * (1.0 - confidence)
    return min(max(rate, config.lr_min), config.lr)


def drawn_for_review(task_id: str, config: EvolutionConfig) -> bool:
    """True for ``review.share`` of all tasks, decided by the hash of the id: a retry or another replica decides the same."""
    draw = int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:8], "big") / 2**64
    return draw < config.review.share


class Rate:
    """At most ``per_minute`` grants in any 60 seconds; below 1, one grant in 60 / per_minute seconds."""

    def __init__(self, per_minute: float):
        self.most = max(int(per_minute), 1)
        self.window_s = 60.0 if per_minute >= 1 else 60.0 / per_minute
        self.granted: deque[float] = deque()

    def allow(self, now: float) -> bool:
        """Take a grant at ``now`` (seconds of any clock that only goes forward); False when there is none left."""
        if self.wait_s(now) > 0:
            return False
        self.granted.append(now)
        return True

    def wait_s(self, now: float) -> float:
        """Seconds until there is a grant; takes none."""
        while self.granted and now - self.granted[0] >= self.window_s:
            self.granted.popleft()
        return 0.0 if len(self.granted) < self.most else self.granted[0] + self.window_s - now
