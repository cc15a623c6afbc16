"""The confidence gate: what becomes an update, at which learning rate, how often, and what is reviewed
first.
"""

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
    """True when the verdict may become an update: learning is enabled, the winner is clear, confidence >=
    ``config.gate``.

    A verdict with a reason in ``CLOSED`` never does, whatever the threshold: its answer is accidental.
    """
    return (
        config.enabled
        and verdict.answer is not None
        and verdict.reason not in CLOSED
        and verdict.confidence >= config.gate - ROUNDING
    )


def learning_rate(confidence: float, config: EvolutionConfig) -> float:
    """Learning rate of an update by the mean confidence of its tasks, within MIN_LR..``lr``.

    ``lr_by`` fixed: ``lr``. confidence: lr x (1 - confidence). Fixed is the default: the gate admits only
    confident verdicts, for which the other rule leaves at most .3 lr, and a group's advantages already shrink
    as its samples agree.
    """
    rate = config.lr if config.lr_by == "fixed" else config.lr * (1.0 - confidence)
    return min(max(rate, MIN_LR), config.lr)


def needs_review(task_id: str, config: EvolutionConfig) -> bool:
    """True for ``review.share`` of all tasks, by the hash of the id, so that retries and replicas agree."""
    fraction = int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:8], "big") / 2**64
    return fraction < config.review.share


class RateLimit:
    """At most ``per_minute`` grants in any 60 seconds; below 1, one grant in 60 / per_minute seconds.

    Times are seconds of any monotonic clock.
    """

    def __init__(self, per_minute: float):
        self.limit = max(int(per_minute), 1)
        self.window_s = 60.0 if per_minute >= 1 else 60.0 / per_minute
        self.granted: deque[float] = deque()

    def allow(self, now: float) -> bool:
        """Use a grant; False when none is available at ``now``."""
        if self.wait_s(now) > 0:
            return False
        self.granted.append(now)
        return True

    def wait_s(self, now: float) -> float:
        """Seconds until a grant is available."""
        while self.granted and now - self.granted[0] >= self.window_s:
            self.granted.popleft()
        return 0.0 if len(self.granted) < self.limit else self.granted[0] + self.window_s - now


class ClearShare:
    """The share of each user's latest verdicts that passed the gate.

    If the policy knows few answers, its samples sometimes agree on a systematic error, and learning from such
    votes reinforces it: TTRL (arXiv 2504.16084) fails without prior knowledge of the task. A low share shows
    this without labels. It is kept by user: pictures of one user that the policy does not understand must not
    stop it learning from the others.
    """

    def __init__(self, config: VotingConfig):
        self.config = config
        self.recent: OrderedDict[str, deque[bool]] = OrderedDict()

    def add(self, user: str, unclear: int) -> bool:
        """Count a clear verdict of ``user`` after ``unclear`` ones; True if enough of the latest ones are
        clear.
        """
        recent = self.recent.setdefault(user, deque(maxlen=WINDOW))
        self.recent.move_to_end(user)
        if len(self.recent) > MAX_USERS:
            self.recent.popitem(last=False)
        recent.extend([False] * min(unclear, WINDOW))
        recent.append(True)
        return len(recent) < WINDOW / 2 or sum(recent) >= self.config.min_clear * len(recent)
