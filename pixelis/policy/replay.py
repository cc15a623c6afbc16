"""Selective sample replay: rollouts that taught something stand in for groups that cannot (VL-Rethinker, Pixel-Reasoner).

A group whose rollouts are all right or all wrong has no gradient. Instead of a smaller batch, samples with a non-zero advantage
from earlier steps are drawn, with probability proportional to |advantage| ** alpha. They keep the advantage and the behaviour
log-probs they were made with, so the loss corrects for their age as for any other stale sample.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from pixelis.records import Group, Trajectory

FLOOR = 1e-4
"""Added to |advantage| before the exponent, as Pixel-Reasoner does."""


@dataclass(frozen=True)
class Kept:
    """One rollout to learn from again: its question's group reduced to it alone, and the reference to the group's views."""

    group: Group
    views: Any
    step: int
    bytes: int

    @property
    def weight(self) -> float:
        """|advantage| of the rollout."""
        return abs(self.group.trajectories[0].advantage or 0.0)


class SampleReplay:
    """Rollouts with non-zero advantages of the last ``max_age`` steps, at most ``capacity`` of them and ``max_bytes`` of views.

    ``alpha`` is the exponent of |advantage|; 0 draws uniformly.
    """

    def __init__(self, capacity: int, alpha: float = 1.0, max_age: int = 16, max_bytes: int = 1_000_000_000):
        self.capacity, self.alpha, self.max_age, self.max_bytes = capacity, alpha, max_age, max_bytes
        self.kept: deque[Kept] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.kept)

    def add(self, group: Group, views: Any, step: int) -> int:
        """Keep the rollouts of a group whose advantage is not zero; returns how many."""
        chosen = [t for t in group.trajectories if t.advantage]
        for trajectory in chosen:
            alone = Group(id=group.id, question=group.question, trajectories=[trajectory], policy_version=group.policy_version)
            self.kept.append(Kept(alone, views, step, _bytes(trajectory)))
            self.bytes += self.kept[-1].bytes
        self._trim(step)
        return len(chosen)

    def draw(self, count: int, step: int, rng: np.random.Generator) -> list[Kept]:
        """Up to ``count`` different rollouts for batch ``step``; they stay in the store until they are too old."""
        self._trim(step)
        count = min(count, len(self.kept))
        if count == 0:
            return []
        weights = np.array([(kept.weight + FLOOR) ** self.alpha for kept in self.kept])
        chosen = rng.choice(len(self.kept), size=count, replace=False, p=weights / weights.sum())
        return [self.kept[i] for i in sorted(chosen)]

    def _trim(self, step: int) -> None:
        while self.kept and (
            len(self.kept) > self.capacity or self.bytes > self.max_bytes or step - self.kept[0].step > self.max_age
        ):
            self.bytes -= self.kept.popleft().bytes


def informative(group: Group, term: str = "accuracy") -> bool:
    """False for a group whose raw ``term`` is the same in every scored rollout: it teaches nothing (DAPO, arXiv 2503.14476).

    The raw accuracy counts, not the shaped reward: else all-wrong groups pass on their format or length and train on noise.
    """
    scores = {t.rewards.get(term) for t in group.trajectories if t.reward is not None}
    return len(scores) > 1


def subset(group: Group, count: int, how: str, rng: np.random.Generator) -> Group:
    """The group with ``count`` of its scored rollouts, in their order: all may have voted, these are learnt from (TTRL 3.1).

    ``how``: `first`, `random`, or `stratified`, which takes them evenly from worst to best reward. 0 keeps every rollout.
    """
    scored = [i for i, trajectory in enumerate(group.trajectories) if trajectory.reward is not None]
    if not count or len(scored) <= count:
        return group
    if how == "random":
        scored = rng.choice(scored, count, replace=False).tolist()
    elif how == "stratified":
        ranked = sorted(scored, key=lambda i: group.trajectories[i].reward or 0.0)
        scored = [ranked[int((k + 0.5) * len(ranked) / count)] for k in range(count)]
    return group.model_copy(update={"trajectories": [group.trajectories[i] for i in sorted(scored[:count])]})


def _bytes(trajectory: Trajectory) -> int:
    return sum(3 * image.view_size[0] * image.view_size[1] for image in trajectory.images)
