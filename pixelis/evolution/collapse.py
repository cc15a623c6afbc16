"""Detects collapse from votes over time: a policy that is about to give everybody the same answer."""

from __future__ import annotations

import math
from collections import Counter, deque

from pixelis.config import VotingConfig
from pixelis.records import Verdict
from pixelis.rewards.scorers import canonical

CHANCE = 1e-4
"""Probability below which a concentration is not taken for an accident of the draw; tested with every verdict, hence small."""


class Collapse:
    """Notices when one answer wins nearly everywhere that used to have many: agreement as an end in itself.

    A vote rewards agreement, and the cheapest way to agree is to say the same whatever the picture shows. Confidence then rises
    while the answers of *different* requests become one. The first ``collapse_window`` winners are what is normal; of the last as
    many, the most common answer is looked at. It is a collapse when all other answers together have at most ``collapse`` times
    the share they had, and two windows of the same traffic would differ so with a probability below 1e-4 (Fisher's exact test).
    Traffic that was uniform from the start never alarms; where a new kind of questions really has one answer it may, at the cost
    of updates that would teach next to nothing: a group of samples that agree has no advantages.

    What is normal does not follow the traffic, or a slow collapse would become normal: ``reset`` after a way back to another
    version, or when a person resumes learning.
    """

    def __init__(self, config: VotingConfig):
        self.config = config
        self.reset()

    def reset(self) -> None:
        """Forget all: the next winners are what is normal."""
        self.normal: list[str] = []
        self.recent: deque[tuple[str, str]] = deque(maxlen=self.config.collapse_window)
        self.collapsed = False

    def seen(self, verdict: Verdict, prompt: str = "") -> bool:
        """Count the verdict; True while the vote has collapsed, and updates are to be refused.

        ``prompt`` names question and pictures, such as their hash: one that is in the window does not count again. A verdict
        without an answer does not count.
        """
        key = canonical(verdict.answer) if verdict.answer is not None else ""
        if not self.config.collapse or not key or (prompt and any(prompt == other for _, other in self.recent)):
            return self.collapsed
        if len(self.normal) < self.config.collapse_window:
            self.normal.append(key)
        self.recent.append((key, prompt))
        self.collapsed = self._judge()
        return self.collapsed

    def stats(self) -> dict[str, float]:
        """``collapsed`` 0 or 1; of the last window ``winners``, how many ``answers``, their ``entropy`` in bits, and of the most
        common one ``top_share`` and the share it used to have, ``normal_share``.
        """
        counts = Counter(key for key, _ in self.recent)
        n = counts.total()
        (top, most), *_ = counts.most_common(1) or [("", 0)]
        return {
            "collapsed": float(self.collapsed),
            "winners": float(n),
            "answers": float(len(counts)),
            "top_share": most / n if n else 0.0,
            "normal_share": self.normal.count(top) / len(self.normal) if self.normal else 0.0,
            "entropy": -math.fsum(c / n * math.log2(c / n) for c in counts.values()),
        }

    def _judge(self) -> bool:
        size = self.config.collapse_window
        if len(self.normal) < size:
            return False
        top, most = Counter(key for key, _ in self.recent).most_common(1)[0]
        others, before = size - most, size - self.normal.count(top)
        return others <= self.config.collapse * before and fewer(others, before, size) < CHANCE


def fewer(now: int, before: int, size: int) -> float:
    """Probability that of ``now + before`` things in two windows of ``size``, ``now`` or fewer lie in the second (Fisher)."""
    total = now + before
    ways = sum(math.comb(size, i) * math.comb(size, total - i) for i in range(max(total - size, 0), now + 1))
    return ways / math.comb(2 * size, total)
