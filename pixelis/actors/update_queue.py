"""Queues update tasks for the learner and forms batches of them."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from pixelis.actors.rollouts import RolloutBatch
from pixelis.config import Config
from pixelis.evolution.gate import learning_rate
from pixelis.evolution.updates import as_group, elected
from pixelis.policy.advantages import assign_advantages
from pixelis.records import Group, Question, UpdateTask


@dataclass(slots=True)
class QueuedTask:
    """A task and the reference to its views; ``approved`` by a reviewer."""

    task: UpdateTask
    views: ray.ObjectRef
    approved: bool = False


class UpdateQueue:
    """At most ``evolution.queue`` tasks. When it is full, the oldest is dropped: fresh traffic teaches more.

    ``counts`` gets the tasks handed to the learner and those that cannot be learnt from.
    """

    def __init__(self, config: Config, counts: Counter[str]):
        self.config = config
        self.items: deque[QueuedTask] = deque(maxlen=config.evolution.queue)
        self.counts = counts
        self.dropped = 0

    def __len__(self) -> int:
        return len(self.items)

    def push(self, item: QueuedTask) -> None:
        """Append a task, dropping the oldest when full."""
        self.dropped += len(self.items) == self.items.maxlen
        self.items.append(item)

    def take(self, count: int) -> list[QueuedTask]:
        """Remove and return up to ``count`` tasks, oldest first."""
        return [self.items.popleft() for _ in range(min(count, len(self.items)))]

    def remove(self, unwanted: Callable[[QueuedTask], bool]) -> list[UpdateTask]:
        """Remove and return the unwanted tasks; the others keep their order."""
        removed = [item.task for item in self.items if unwanted(item)]
        self.items = deque((item for item in self.items if not unwanted(item)), maxlen=self.items.maxlen)
        return removed

    def batch(self, world: int, served: int, beta: float) -> tuple[RolloutBatch, list[UpdateTask]] | None:
        """A batch of the oldest ``evolution.batch`` tasks, and these tasks; None when usable tasks are fewer than ranks.

        ``served`` is the policy version for the metric of lag, ``beta`` the weight of the KL penalty. With objective=answer, a
        reviewer's label that no sample gave is not usable: it has no tokens.
        """
        e = self.config.evolution
        items = self.take(e.batch)
        all_groups = [as_group(item.task) for item in items]
        assign_advantages(all_groups, self.config.rft.advantage)
        groups, views, tasks = [], [], []
        for item, group in zip(items, all_groups, strict=True):
            no_tokens = e.objective == "answer" and not elected(group.trajectories, item.task.pseudo_label)
            if no_tokens or all(t.advantage is None for t in group.trajectories):
                self.counts["unusable"] += 1
                continue
            groups.append(group)
            views.append(item.views)
            tasks.append(item.task)
        if len(groups) < world:
            self.counts["unusable"] += len(groups)
            return None
        self.counts["handed"] += len(groups)
        metrics = _metrics(groups, tasks, served)
        rate = learning_rate(metrics["evolve/confidence"], e)
        batch = RolloutBatch(0, groups, views, metrics=metrics | {"evolve/lr": rate, "evolve/beta": beta})
        batch.options = {"lr": rate, "kl_weight": beta, "kl_limit": 2 * e.guard.target}
        return batch, tasks


def _metrics(groups: list[Group], tasks: list[UpdateTask], version: int) -> dict[str, float]:
    """Tasks of an update, mean confidence, share of uniform groups (no signal), age in seconds, lag in versions."""
    now, n = time.time(), len(tasks)
    return {
        "evolve/tasks": float(n),
        "evolve/confidence": sum(t.confidence for t in tasks) / n,
        "evolve/uniform": sum(len({t.reward for t in g.trajectories}) == 1 for g in groups) / n,
        "evolve/age_s": sum(now - t.created_at for t in tasks) / n,
        "evolve/lag": sum(max(0, version - g.policy_version) for g in groups) / n,
    }


def prompt_key(task: UpdateTask, question: Question | None, views: dict[str, Any]) -> str:
    """A hash of the question and of the pixels of its first picture."""
    digest = hashlib.sha256((question.question if question is not None else "").encode())
    for view in views.get(task.trajectories[0].id, [])[:1]:
        digest.update(view.tobytes())
    return digest.hexdigest()
