"""Queues update tasks for the learner and forms batches of them, in which no user has more than its share."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pixelis.actors.rollouts import RolloutBatch
from pixelis.actors.update_pictures import PictureViews, references
from pixelis.config import Config
from pixelis.errors import BadConfig
from pixelis.evolution.gate import learning_rate
from pixelis.evolution.shares import LargestShares, Shares, Source, most_abundant
from pixelis.evolution.updates import agreeing, as_group
from pixelis.files import write_json
from pixelis.policy.advantages import assign_advantages
from pixelis.records import Group, Question, UpdateTask

log = logging.getLogger(__name__)
TASK_COUNTS = (
    "received", "handed", "refused", "paused", "unclear", "collapsed", "withdrawn", "disowned", "private", "lost", "unusable",
    "left_over", "held_out",
)  # fmt: skip
"""Tasks by outcome, beside those dropped from a full queue and those in review."""


@dataclass(slots=True)
class QueuedTask:
    """A task and its stored views; ``question`` names its group of near-identical ones, ``approved`` by a reviewer."""

    task: UpdateTask
    views: PictureViews
    question: str
    approved: bool = False

    @property
    def source(self) -> Source:
        """Whose share of an update it counts towards."""
        return Source(self.task.user, self.question)


class UpdateQueue:
    """At most ``evolution.queue`` tasks, of which batches within ``Shares`` are formed.

    A full queue drops the oldest task of the user with the most. ``counts`` gets the tasks handed to the learner.
    """

    def __init__(self, config: Config, counts: Counter[str]):
        self.config = config
        self.items: list[QueuedTask] = []
        self.counts = counts
        self.shares = Shares(config.evolution)
        self.dropped = 0
        self.changed = asyncio.Condition()
        """Notified when a task is added, and when what may be learnt changes."""
        self.file = Path(config.run.dir) / "versions" / "shares.json"

    def restore_shares(self) -> None:
        """Continue with the shares of an earlier process in this run.dir. Raises BadConfig for a damaged file."""
        try:
            self.shares.restore(json.loads(self.file.read_text(encoding="utf-8")), time.monotonic(), time.time())
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadConfig(
                f"{self.file} cannot be read: {error}", fix="move it away: the caps on users then begin anew"
            ) from None

    async def save_shares(self) -> None:
        """Write the shares to disk."""
        state = self.shares.state(time.monotonic(), time.time())
        try:
            await asyncio.to_thread(write_json, self.file, state)
        except OSError as error:  # without them only a restart is less strict
            log.warning("the shares of users are not saved: %s", error)

    def __len__(self) -> int:
        return len(self.items)

    def usable(self, task: UpdateTask) -> bool:
        """Whether anything can be learnt from a task.

        Nothing can when no trajectory is scored that saw the pictures as they are, or with objective=answer when no sample gave
        the label.
        """
        e, group = self.config.evolution, as_group(task)
        if e.objective == "answer" and not agreeing(group.trajectories, task.pseudo_label):
            return False
        assign_advantages([group], self.config.rft.advantage)
        return any(t.advantage is not None and t.augmentation is None for t in group.trajectories)

    def push(self, item: QueuedTask) -> None:
        """Append a task; a full queue drops another one."""
        self.shares.note(item.task.user, time.monotonic())
        if len(self.items) == self.config.evolution.queue:
            del self.items[most_abundant(self.sources())]
            self.dropped += 1
        self.items.append(item)

    def sources(self) -> list[Source]:
        """The source of every task, oldest first."""
        return [item.source for item in self.items]

    def remove(self, unwanted: Callable[[QueuedTask], bool]) -> list[UpdateTask]:
        """Remove and return the unwanted tasks; the others keep their order."""
        removed = [item.task for item in self.items if unwanted(item)]
        self.items = [item for item in self.items if not unwanted(item)]
        return removed

    def ready(self, least: int) -> list[int]:
        """Indices of the next batch: ``least`` to ``evolution.batch`` tasks within the caps; empty if there are too few."""
        return self.shares.choose(self.sources(), least, self.config.evolution.batch, time.monotonic())

    def batch(
        self, indices: Sequence[int], served: int, beta: float, rehearsed: Sequence[QueuedTask] = ()
    ) -> tuple[RolloutBatch, list[QueuedTask]]:
        """Remove the tasks at ``indices`` and form a batch of them and ``rehearsed``; returns it and the removed tasks.

        ``served`` is the policy version for the metric of lag, ``beta`` the weight of the KL penalty.
        """
        e = self.config.evolution
        items, chosen = [self.items[i] for i in indices], set(indices)
        self.items = [item for i, item in enumerate(self.items) if i not in chosen]
        groups = [as_group(item.task) for item in items]
        assign_advantages(groups, self.config.rft.advantage)
        self.counts["handed"] += len(groups)
        metrics = _metrics(groups, items, served) | {"evolve/rehearsed": float(len(rehearsed))}
        rate = learning_rate(metrics["evolve/confidence"], e)
        groups += [as_group(item.task) for item in rehearsed]
        views = [references(item.views) for item in (*items, *rehearsed)]
        batch = RolloutBatch(0, groups, views, metrics=metrics | {"evolve/lr": rate, "evolve/beta": beta})
        batch.options = {"lr": rate, "kl_weight": beta, "kl_limit": 2 * e.guard.target}
        return batch, items


def _metrics(groups: list[Group], items: list[QueuedTask], version: int) -> dict[str, float]:
    """Tasks, largest shares, mean confidence, share of uniform groups (no signal), age in seconds, lag in versions."""
    now, tasks = time.time(), [item.task for item in items]
    n, shares = len(tasks), LargestShares.of([item.source for item in items])
    return {
        "evolve/user_share": shares.user_share,
        "evolve/question_share": shares.question_share,
        "evolve/tasks": float(n),
        "evolve/confidence": sum(t.confidence for t in tasks) / n,
        "evolve/uniform": sum(len({t.reward for t in g.trajectories}) == 1 for g in groups) / n,
        "evolve/age_s": sum(now - t.created_at for t in tasks) / n,
        "evolve/lag": sum(max(0, version - g.policy_version) for g in groups) / n,
    }


def prompt_key(task: UpdateTask, question: Question | None, views: dict[str, Any]) -> str:
    """A hash of the question and of the pixels of its first picture."""
    digest = hashlib.sha256((question.conversation if question is not None else "").encode())
    for view in views.get(task.trajectories[0].id, [])[:1]:
        digest.update(view.tobytes())
    return digest.hexdigest()
