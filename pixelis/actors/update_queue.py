"""Queues update tasks and forms the learner's batches within users' shares; rehearses earlier answers."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from ray.exceptions import RayError

from pixelis.actors.evolution_monitor import log_failures
from pixelis.actors.group_views import PictureViews, UpdatePictures
from pixelis.actors.memory import Memory
from pixelis.actors.rollouts import RolloutBatch
from pixelis.config import Config, EvolutionConfig
from pixelis.errors import PixelisError
from pixelis.evolution.gate import learning_rate
from pixelis.evolution.shares import LargestShares, Shares, Source, most_abundant, most_tasks
from pixelis.evolution.updates import agreeing, as_group
from pixelis.files import damaged_file, write_json
from pixelis.policy.advantages import assign_advantages
from pixelis.records import Experience, UpdateTask
from pixelis.rewards.vote import called_wrong

log = logging.getLogger(__name__)
TASK_COUNTS = (
    "received", "handed", "refused", "paused", "unclear", "withdrawn", "disowned", "private", "lost", "unusable",
    "left_over", "held_out", "repeated",
)  # fmt: skip
"""Tasks by outcome, beside those dropped from a full queue and those in review."""
SURPLUS = 2
"""Experiences drawn for each that is rehearsed: some have no pictures, or too many are of one user."""


@dataclass(slots=True)
class QueuedTask:
    """A task that waits for the learner, with its views and the group of its question."""

    task: UpdateTask
    views: PictureViews
    question: str
    approved: bool = False

    @property
    def source(self) -> Source:
        return Source(self.task.user, self.question)


class UpdateQueue:
    """At most ``evolution.queue`` tasks; a full queue drops the oldest task of the user with the most."""

    def __init__(self, config: Config, counts: Counter[str]):
        self.config, self.counts = config, counts
        self.items: list[QueuedTask] = []
        self.shares = Shares(config.evolution)
        self.dropped = 0
        self.changed = asyncio.Condition()
        """Notified when a task is added, and when what may be learnt changes."""
        self.file = Path(config.run.dir) / "versions" / "shares.json"

    def restore_shares(self) -> None:
        if self.file.is_file():
            with damaged_file(self.file, "restore it, or remove it: the shares of users then begin anew"):
                self.shares.restore(json.loads(self.file.read_bytes()), time.monotonic(), time.time())

    async def save_shares(self) -> None:
        state = self.shares.state(time.monotonic(), time.time())
        with log_failures("the shares of users are not saved"):  # only a restart would be less strict
            await asyncio.to_thread(write_json, self.file, state)

    def __len__(self) -> int:
        return len(self.items)

    def usable(self, task: UpdateTask) -> bool:
        """Whether a trajectory that saw the pictures as they are has an advantage, or the answer to imitate."""
        e, group = self.config.evolution, as_group(task)
        if e.objective == "answer" and not agreeing(group.trajectories, task.pseudo_label):
            return False
        assign_advantages([group], self.config.rft.advantage)
        return any(t.advantage is not None and t.augmentation is None for t in group.trajectories)

    def push(self, item: QueuedTask) -> None:
        self.shares.note(item.task.user, time.monotonic())
        if len(self.items) == self.config.evolution.queue:
            del self.items[most_abundant([item.source for item in self.items])]
            self.dropped += 1
        self.items.append(item)

    def remove(self, unwanted: Callable[[QueuedTask], bool]) -> list[UpdateTask]:
        removed = [item.task for item in self.items if unwanted(item)]
        self.items = [item for item in self.items if not unwanted(item)]
        return removed

    def ready(self, least: int) -> list[int]:
        """Indices of the next batch: ``least`` to ``evolution.batch`` tasks within the caps; or empty."""
        sources = [item.source for item in self.items]
        return self.shares.choose(sources, least, self.config.evolution.batch, time.monotonic())

    def batch(
        self, indices: Sequence[int], served: int, beta: float, rehearsed: Sequence[QueuedTask] = ()
    ) -> tuple[RolloutBatch, list[QueuedTask]]:
        """Remove the tasks at ``indices``; returns a batch of them and ``rehearsed``, and the removed tasks.

        ``served``: policy version, for the metric of lag; ``beta``: weight of the KL penalty.
        """
        e, chosen = self.config.evolution, set(indices)
        items = [self.items[i] for i in indices]
        self.items = [item for i, item in enumerate(self.items) if i not in chosen]
        groups, tasks = [as_group(item.task) for item in items], [item.task for item in items]
        assign_advantages(groups, self.config.rft.advantage)
        self.counts["handed"] += len(groups)
        now, n, shares = time.time(), len(items), LargestShares.of([item.source for item in items])
        confidence = sum(task.confidence for task in tasks) / n
        rate = learning_rate(confidence, e)
        metrics = {
            "evolve/tasks": float(n),
            "evolve/rehearsed": float(len(rehearsed)),
            "evolve/user_share": shares.user_share,
            "evolve/question_share": shares.question_share,
            "evolve/confidence": confidence,
            "evolve/uniform": sum(len({t.reward for t in g.trajectories}) == 1 for g in groups) / n,
            "evolve/age_s": sum(now - task.created_at for task in tasks) / n,
            "evolve/lag": sum(max(0, served - group.policy_version) for group in groups) / n,
            "evolve/lr": rate,
            "evolve/beta": beta,
        }
        groups += [as_group(item.task) for item in rehearsed]
        views = [item.views for item in (*items, *rehearsed)]
        options = {"lr": rate, "kl_weight": beta, "kl_limit": 2 * e.guard.target}
        return RolloutBatch(0, groups, views, metrics=metrics, options=options), items


class Rehearsal:
    """Draws ``evolution.rehearse`` learnt experiences for each update, so that new traffic undoes none.

    They are drawn by priority and success while the learner computes: no update waits for them.
    """

    def __init__(self, config: EvolutionConfig, memory: Memory | None, pictures: UpdatePictures):
        self.count = config.rehearse if memory is not None else 0
        self.memory, self.pictures = memory, pictures
        self.items: list[QueuedTask] = []
        self.drawing: asyncio.Task[None] | None = None

    def prepare(self, cap: float) -> None:
        """Draw for the next update, in the background, with at most the share ``cap`` of a user."""
        if self.count and not self.items and (self.drawing is None or self.drawing.done()):
            self.drawing = asyncio.create_task(self._draw(cap))

    def take(self, withdrawn: Container[int], forgotten: Container[str]) -> list[QueuedTask]:
        items, self.items = self.items, []
        current = [item for item in items if item.task.trajectories[0].policy_version not in withdrawn]
        return [item for item in current if item.task.experience_id not in forgotten]

    def forget(self, experience_ids: Iterable[str]) -> None:
        """Drop experiences that are deleted or called wrong; a running draw may have them."""
        if self.drawing is not None:
            self.drawing.cancel()
        unwanted = set(experience_ids)
        self.items = [item for item in self.items if item.task.experience_id not in unwanted]

    async def _draw(self, cap: float) -> None:
        assert self.memory is not None
        try:
            experiences = await self.memory.sample(SURPLUS * self.count, status="processed")
            chosen = within_share([e for e in experiences if usable(e)], self.count, cap)
            stored = await asyncio.gather(*(self.memory.pictures(e.id) for e in chosen))
            self.items = await asyncio.to_thread(self._load, list(zip(chosen, stored, strict=True)))
        except (PixelisError, RayError) as error:  # the update goes on without
            log.warning("nothing is rehearsed: %s", error)

    def _load(self, pairs: Sequence[tuple[Experience, Mapping[str, bytes]]]) -> list[QueuedTask]:
        items = []
        for experience, stored in pairs:
            images = [image.id for image in experience.trajectory.images]
            if all(id in stored for id in images):
                views = [np.asarray(Image.open(io.BytesIO(stored[id])).convert("RGB")) for id in images]
                held = self.pictures.hold({experience.trajectory.id: views})
                items.append(QueuedTask(as_task(experience), held, ""))
        return items


def usable(experience: Experience) -> bool:
    """Whether it can be imitated: it has an elected answer, nobody called it wrong, no token was redacted."""
    is_elected = experience.verdict.answer is not None and not called_wrong(experience)
    return is_elected and all(turn.tokens for turn in experience.trajectory.turns)


def within_share(experiences: Iterable[Experience], most: int, cap: float) -> list[Experience]:
    """The first ``most`` experiences of which no user has more than the share ``cap``, 0..1."""
    counts, chosen = Counter[str | None](), list[Experience]()
    for experience in experiences:
        if len(chosen) < most and counts[experience.user] < most_tasks(cap, most):
            counts[experience.user] += 1
            chosen.append(experience)
    return chosen


def as_task(experience: Experience) -> UpdateTask:
    """The task of the elected trajectory, without an advantage: its log-probabilities are of old weights."""
    return UpdateTask(
        question_id=experience.question.id,
        trajectories=[experience.trajectory.model_copy(update={"advantage": None})],
        pseudo_label=experience.verdict.answer or "",
        confidence=experience.verdict.confidence,
        created_at=experience.created_at,
        experience_id=experience.id,
        user=experience.user or "",
    )
