"""Queues update tasks for the learner and forms batches of them."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import ray

from pixelis.actors.rollouts import RolloutBatch
from pixelis.config import AdvantageConfig
from pixelis.evolution.updates import DropOldest, as_group, elected
from pixelis.policy.advantages import assign_advantages
from pixelis.records import Group, Question, UpdateTask


@dataclass(slots=True)
class Waiting:
    """A task and the reference to its views; ``approved`` by a person."""

    task: UpdateTask
    views: ray.ObjectRef
    approved: bool = False


class Tasks(DropOldest[Waiting]):
    """The queue of tasks; ``counts`` learns what becomes of those that are taken."""

    def __init__(self, limit: int, counts: Counter[str]):
        super().__init__(limit)
        self.counts = counts

    def discard(self, unwanted: Callable[[UpdateTask], bool]) -> int:
        """Take out what must not be learnt from; how many that were."""
        return self.remove(lambda item: unwanted(item.task))

    def pause(self) -> int:
        """Take out all but what a person approved; how many that were."""
        return self.remove(lambda item: not item.approved)

    def batch(
        self, size: int, world: int, settings: AdvantageConfig, objective: Literal["answer", "policy"] = "policy"
    ) -> tuple[RolloutBatch, list[UpdateTask]] | None:
        """The oldest ``size`` tasks with their advantages, and what they were; None when a rank would get no usable one.

        With objective=answer a label that none of the samples gave, a reviewer's, has no tokens to learn it from.
        """
        waiting = self.take(size)
        all_groups = [as_group(item.task) for item in waiting]
        assign_advantages(all_groups, settings)
        groups, views, kept = [], [], []
        for item, group in zip(waiting, all_groups, strict=True):
            unsaid = objective == "answer" and not elected(group.trajectories, item.task.pseudo_label)
            if unsaid or all(t.advantage is None for t in group.trajectories):
                self.counts["unusable"] += 1
                continue
            groups.append(group)
            views.append(item.views)
            kept.append(item.task)
        if len(groups) < world:
            self.counts["unusable"] += len(groups)
            return None
        self.counts["handed"] += len(groups)
        return RolloutBatch(0, groups, views), kept


def update_metrics(groups: list[Group], tasks: list[UpdateTask], version: int) -> dict[str, float]:
    """What an update learns from: confidence, share of uniform groups (no signal), age in seconds, lag in versions."""
    now, n = time.time(), len(tasks)
    return {
        "evolve/tasks": float(n),
        "evolve/confidence": sum(t.confidence for t in tasks) / n,
        "evolve/uniform": sum(len({t.reward for t in g.trajectories}) == 1 for g in groups) / n,
        "evolve/age_s": sum(now - t.created_at for t in tasks) / n,
        "evolve/lag": sum(max(0, version - g.policy_version) for g in groups) / n,
    }


def prompt_key(task: UpdateTask, question: Question | None, seen: dict[str, Any]) -> str:
    """What tells prompts apart: the question and the pixels of its first picture."""
    digest = hashlib.sha256((question.question if question is not None else "").encode())
    for view in seen.get(task.trajectories[0].id, [])[:1]:
        digest.update(view.tobytes())
    return digest.hexdigest()
