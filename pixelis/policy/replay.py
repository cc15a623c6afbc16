"""Selective sample replay: earlier rollouts replace groups without a gradient (VL-Rethinker, Pixel-Reasoner).

They keep their behaviour log-probabilities, so the loss corrects for their age as for any off-policy sample.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pixelis.policy.advantages import group_rewards, usable
from pixelis.records import Group

if TYPE_CHECKING:
    from pixelis import config

FLOOR = 1e-4
"""Added to |advantage| before the exponent, as in Pixel-Reasoner."""
MAX_AGE, MAX_BYTES = 8, 1_000_000_000
"""Most steps since a kept rollout was made, and most bytes of kept views in the object store."""


@dataclass(frozen=True)
class ReplaySample:
    """A group of one rollout. views: reference to its original group's images."""

    group: Group
    views: Any
    step: int
    bytes: int

    @property
    def weight(self) -> float:
        return abs(self.group.trajectories[0].advantage or 0.0)


class SampleReplay:
    """Rollouts with an advantage, drawn in proportion to |advantage| ** alpha."""

    def __init__(self, capacity: int, alpha: float = 1.0, max_age: int = MAX_AGE, max_bytes: int = MAX_BYTES):
        self.capacity, self.alpha, self.max_age, self.max_bytes = capacity, alpha, max_age, max_bytes
        self.samples: deque[ReplaySample] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.samples)

    def add(self, group: Group, views: Any, step: int, least: float = 0.0) -> int:
        """Store the rollouts whose |advantage| is above 0 and at least `least`; returns their number."""
        chosen = [t for t in group.trajectories if t.advantage and abs(t.advantage) >= least]
        for trajectory in chosen:
            single = Group(
                id=group.id,
                question=group.question,
                trajectories=[trajectory],
                policy_version=group.policy_version,
            )
            size = sum(3 * image.view_size[0] * image.view_size[1] for image in trajectory.images)
            self.samples.append(ReplaySample(single, views, step, size))
            self.bytes += size
        self._evict(step)
        return len(chosen)

    def draw(self, count: int, step: int, rng: np.random.Generator) -> list[ReplaySample]:
        """Up to `count` distinct rollouts, which stay in the store."""
        self._evict(step)
        count = min(count, len(self.samples))
        if count == 0:
            return []
        weights = np.array([(sample.weight + FLOOR) ** self.alpha for sample in self.samples])
        chosen = rng.choice(len(self.samples), size=count, replace=False, p=weights / weights.sum())
        return [self.samples[i] for i in sorted(chosen)]

    def _evict(self, step: int) -> None:
        while self.samples and (
            len(self.samples) > self.capacity
            or self.bytes > self.max_bytes
            or step - self.samples[0].step > self.max_age
        ):
            self.bytes -= self.samples.popleft().bytes


def least_kept(groups: Sequence[Group], settings: config.ReplayConfig) -> float:
    """The smallest |advantage| of a batch that is kept (Pixelis, arXiv 2603.25091: above 0.01, top 30 %)."""
    sizes = [abs(t.advantage) for group in groups for t in group.trajectories if t.advantage is not None]
    quantile = float(np.quantile(sizes, settings.quantile)) if sizes and settings.quantile else 0.0
    return max(quantile, math.nextafter(settings.min_advantage, math.inf) if settings.min_advantage else 0.0)


def informative(group: Group, settings: config.RftConfig) -> bool:
    """Whether a group has advantages and `rft.filter` keeps it (DAPO, arXiv 2503.14476; EasyR1; Mini-o3)."""
    rule, advantage = settings.filter, settings.advantage
    rewards = group_rewards(group, advantage)
    excluded = [t.stop_reason.value in advantage.exclude for t in group.trajectories]
    if not usable(rewards, advantage):
        return False
    if rule.complete and any(
        t.reward is None and not out for t, out in zip(group.trajectories, excluded, strict=True)
    ):
        return False
    if rule.key == "none":
        return True
    values = [
        reward if out or rule.key == "reward" else t.rewards.get(rule.key)
        for t, reward, out in zip(group.trajectories, rewards, excluded, strict=True)
        if reward is not None
    ]
    scores = [value for value in values if value is not None]
    if len(scores) < 2 or max(scores) == min(scores) or statistics.stdev(scores) < rule.min_std:
        return False
    mean = statistics.fmean(scores)
    return (rule.low is None or mean > rule.low) and (rule.high is None or mean < rule.high)


def subset(group: Group, count: int, method: str, rng: np.random.Generator) -> Group:
    """The group reduced to `count` of its scored rollouts; 0 keeps all.

    method: `first`, `random`, or `stratified`, evenly from worst to best reward.
    """
    scored = [i for i, trajectory in enumerate(group.trajectories) if trajectory.reward is not None]
    if not count or len(scored) <= count:
        return group
    if method == "random":
        scored = rng.choice(scored, count, replace=False).tolist()
    elif method == "stratified":
        ranked = sorted(scored, key=lambda i: group.trajectories[i].reward or 0.0)
        scored = [ranked[int((k + 0.5) * len(ranked) / count)] for k in range(count)]
    return group.model_copy(update={"trajectories": [group.trajectories[i] for i in sorted(scored[:count])]})
