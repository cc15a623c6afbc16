"""Detects collapse from votes over time: a policy that gives the same answer to different questions."""

from __future__ import annotations

import math
from collections import Counter, deque

from pixelis.config import VotingConfig
from pixelis.records import Verdict
from pixelis.rewards.scorers import canonical

WINDOW = 64
"""Number of first and of latest winners that are compared."""
SIGNIFICANCE = 1e-4
"""Probability below which a concentration is no chance; small, because every verdict is a test."""


class Collapse:
    """Detects that one answer wins nearly everywhere: a vote rewards agreement, whatever the picture shows.

    The vote has collapsed if, among the last WINDOW winners, answers other than the most common one have at
    most ``collapse`` times their share of the first WINDOW, and Fisher's exact test gives a p below
    SIGNIFICANCE. A moving baseline would hide a slow collapse.
    """

    def __init__(self, config: VotingConfig):
        self.config = config
        self.reset()

    def reset(self) -> None:
        """Take the next winners as the baseline."""
        self.baseline: list[str] = []
        self.recent: deque[tuple[str, str]] = deque(maxlen=WINDOW)
        self.collapsed = False

    def add(self, verdict: Verdict, prompt: str = "") -> bool:
        """Count a verdict with an answer; True while the vote has collapsed.

        ``prompt`` identifies question and pictures; one in the recent window is not counted again.
        """
        key = canonical(verdict.answer) if verdict.answer is not None else ""
        if (
            not self.config.collapse
            or not key
            or (prompt and any(prompt == other for _, other in self.recent))
        ):
            return self.collapsed
        if len(self.baseline) < WINDOW:
            self.baseline.append(key)
        self.recent.append((key, prompt))
        self.collapsed = self._judge()
        return self.collapsed

    def stats(self) -> dict[str, float]:
        """Of the recent window; ``entropy`` in bits, ``normal_share``: the top answer's in the baseline."""
        counts = Counter(key for key, _ in self.recent)
        n = counts.total()
        (top, count), *_ = counts.most_common(1) or [("", 0)]
        return {
            "collapsed": float(self.collapsed),
            "winners": float(n),
            "answers": float(len(counts)),
            "top_share": count / n if n else 0.0,
            "normal_share": self.baseline.count(top) / len(self.baseline) if self.baseline else 0.0,
            "entropy": -math.fsum(c / n * math.log2(c / n) for c in counts.values()),
        }

    def _judge(self) -> bool:
        if len(self.baseline) < WINDOW:
            return False
        top, count = Counter(key for key, _ in self.recent).most_common(1)[0]
        others, before = WINDOW - count, WINDOW - self.baseline.count(top)
        if others > self.config.collapse * before:
            return False
        from scipy.stats import hypergeom  # scipy.stats takes a second to import

        return bool(hypergeom.cdf(others, 2 * WINDOW, others + before, WINDOW) < SIGNIFICANCE)
