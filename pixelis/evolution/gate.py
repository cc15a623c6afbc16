"""The confidence gate: what becomes an update, at which learning rate, how often, and what is reviewed."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque

from pixelis.config import EvolutionConfig, VotingConfig
from pixelis.config.evolution import MIN_LR
from pixelis.records import Verdict
from pixelis.rewards.vote import CLOSED

WINDOW = 64
"""Latest verdicts of a user that count; it is judged from half as many on."""
MAX_USERS = 10_000
ROUNDING = 1e-9
"""Tolerance of the comparison with the gate: confidence is a product of fractions."""


def gate(verdict: Verdict, config: EvolutionConfig) -> bool:
    """Whether a verdict may become an update. A reason in ``CLOSED`` means that its answer is accidental."""
    return (
        config.enabled
        and verdict.answer is not None
        and verdict.reason not in CLOSED
        and verdict.confidence >= config.gate - ROUNDING
    )


def learning_rate(confidence: float, config: EvolutionConfig) -> float:
    """Learning rate of an update by the mean confidence of its tasks, within MIN_LR..``lr``."""
    rate = config.lr if config.lr_by == "fixed" else config.lr * (1.0 - confidence)
    return min(max(rate, MIN_LR), config.lr)


def needs_review(task_id: str, config: EvolutionConfig) -> bool:
    """Whether a task is reviewed: by the hash of its id, so that retries and replicas agree."""
    fraction = int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:8], "big") / 2**64
    return fraction < config.review.share


class RateLimit:
    """At most ``per_minute`` grants in any 60 seconds; below 1, one in 60 / per_minute seconds."""

    def __init__(self, per_minute: float):
        self.limit = max(int(per_minute), 1)
        self.window_s = 60.0 if per_minute >= 1 else 60.0 / per_minute
        self.granted: deque[float] = deque()

    def allow(self, now: float) -> bool:
        """Use a grant, if one is available at ``now`` (seconds of any monotonic clock)."""
        if self.wait_s(now) > 0:
            return False
        self.granted.append(now)
        return True

    def wait_s(self, now: float) -> float:
        while self.granted and now - self.granted[0] >= self.window_s:
            self.granted.popleft()
        return 0.0 if len(self.granted) < self.limit else self.granted[0] + self.window_s - now


class ClearShare:
    """The share of each user's latest verdicts that passed the gate.

    A low share shows without labels that the policy knows few answers; learning from the errors on which its
    samples sometimes agree would reinforce them (TTRL, arXiv 2504.16084, fails without prior knowledge).
    """

    def __init__(self, config: VotingConfig):
        self.config = config
        self.recent: OrderedDict[str, deque[bool]] = OrderedDict()

    def add(self, user: str, unclear: int) -> bool:
        """Count a clear verdict after ``unclear`` ones; True if enough of the latest are clear."""
        recent = self.recent.setdefault(user, deque(maxlen=WINDOW))
        self.recent.move_to_end(user)
        if len(self.recent) > MAX_USERS:
            self.recent.popitem(last=False)
        recent.extend([False] * min(unclear, WINDOW))
        recent.append(True)
        return len(recent) < WINDOW / 2 or sum(recent) >= self.config.min_clear * len(recent)
