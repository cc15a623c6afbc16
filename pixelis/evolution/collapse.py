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
"""Probability below which a concentration is not taken for chance; small, because it is tested with every
verdict.
"""


class Collapse:
    """Detects that one answer wins nearly everywhere.

    A vote rewards agreement, so a policy may learn to give the same answer whatever the picture shows. The
    first WINDOW winners are the baseline, the last WINDOW the recent window. The vote has collapsed if
    answers other than the most common recent one have at most ``collapse`` times their share in the baseline,
    and Fisher's exact test gives a p below SIGNIFICANCE. The baseline is fixed, because a moving one would
    hide a slow collapse; call ``reset`` after a rollback or when a person resumes learning.
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
        """Count the verdict; True while the vote has collapsed and updates must be refused.

        ``prompt`` identifies question and pictures. Verdicts without an answer and prompts in the recent
        window are not counted.
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
        """``collapsed`` 0 or 1, and of the recent window: number of ``winners``, of distinct ``answers``,
        their ``entropy`` in bits, the share of the most common answer (``top_share``) and its share in the
        baseline (``normal_share``).
        """
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
        size = WINDOW
        if len(self.baseline) < size:
            return False
        top, count = Counter(key for key, _ in self.recent).most_common(1)[0]
        others, before = size - count, size - self.baseline.count(top)
        if others > self.config.collapse * before:
            return False
        from scipy.stats import hypergeom  # scipy.stats takes a second to import

        return bool(hypergeom.cdf(others, 2 * size, others + before, size) < SIGNIFICANCE)
