"""The Evolution actor: update tasks from traffic come in, batches for the learner go out.

It offers the learner what the Coordinator offers (``begin``, ``next_batch``, ``stepped``, ``stop``), so that one worker
group serves both streams. Records and references only; pixels and tensors pass it by.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis.actors.fleet import Fleet
from pixelis.actors.rollouts import Batch, Stepped
from pixelis.config import Config
from pixelis.evolution.updates import DropOldest, as_group
from pixelis.policy.advantages import assign_advantages
from pixelis.records import Group, UpdateTask


@dataclass(slots=True)
class Waiting:
    """A task and the reference to its views."""

    task: UpdateTask
    views: ray.ObjectRef


@ray.remote(num_cpus=0, max_restarts=0)
class Evolution:
    """Holds at most ``evolution.queue`` tasks; gives the learner ``evolution.batch`` of them per step."""

    def __init__(self, config: Config, generators: list[ActorHandle]):
        self.config = config
        self.fleet = Fleet(generators)
        self.queue: DropOldest[Waiting] = DropOldest(config.evolution.queue)
        self.counts: Counter[str] = Counter()
        self.step, self.version = 0, 0
        self.current: Batch | None = None
        self.given: set[int] = set()
        self.learning = self.draining = self.stopped = False
        self.changed = asyncio.Condition()

    def health(self) -> str:
        """Answers when alive."""
        return "ok"

    # -- from the gateway -------------------------------------------------------------------------------------------

    async def submit(self, task: UpdateTask, views: list[ray.ObjectRef]) -> bool:
        """Queue a task; ``views`` is ``[reference to {trajectory id: views}]``. False when draining, stopped or views are lost.

        The views are stored again under this actor's name: an object dies with its owner, and the gateway's replica that
        owns these may be gone long before the learner reads them.
        """
        if self.draining or self.stopped:
            self.counts["refused"] += 1
            return False
        try:
            kept = ray.put(await _value(views[0]))
        except RayError:
            self.counts["lost"] += 1
            return False
        async with self.changed:
            self.counts["received"] += 1
            self.queue.push(Waiting(task, kept))
            self.changed.notify_all()
        return True

    async def stats(self) -> dict[str, int]:
        """Version served, whether a learner is there, updates applied, and tasks by what became of them."""
        names = ("received", "handed", "refused", "lost", "unusable", "left_over")
        return {
            "version": self.version,
            "learning": int(self.learning),
            "updates": self.counts["updates"],
            "queue": len(self.queue),
            "dropped": self.queue.dropped,
            **{name: self.counts[name] for name in names},
        }

    # -- from the learner -------------------------------------------------------------------------------------------

    async def begin(self, step: int, state: dict[str, Any], version: int) -> None:
        """The learner (re)starts at ``step`` with ``version``; a batch it was given but did not finish is given again."""
        await self.fleet.load(version)
        async with self.changed:
            self.step, self.version, self.learning = step, version, True
            self.given.clear()
            if self.current is not None:
                self.current.step = step
            self.changed.notify_all()

    async def next_batch(self, rank: int, world: int, step: int) -> Batch | None:
        """Rank ``rank``'s share of update ``step``: whole groups, round robin; None when drained or stopped.

        Waits for ``evolution.batch`` tasks; while draining a smaller last batch goes out, if every rank gets a group.
        """
        async with self.changed:
            await self.changed.wait_for(lambda: self.stopped or (step == self.step and self._ready(world)))
            # Once one rank has its share all must get theirs, or the optimizer step would wait for ever.
            if self.current is None or (self.stopped and not self.given):
                return None
            self.given.add(rank)
            whole = self.current
        return whole.share(rank, world)

    def _ready(self, world: int) -> bool:
        """Form the batch of this step once: True when there is one, or when there will never be."""
        size = self.config.evolution.batch
        while self.current is None and (len(self.queue) >= size or (self.draining and len(self.queue) >= world)):
            self.current = self._batch(self.queue.take(size), world)
        if self.current is None and self.draining:
            self.counts["left_over"] += len(self.queue.take(len(self.queue)))
            return True
        return self.current is not None

    def _batch(self, waiting: list[Waiting], world: int) -> Batch | None:
        all_groups = [as_group(item.task) for item in waiting]
        assign_advantages(all_groups, self.config.rft.advantage)
        groups, views, kept = [], [], []
        for item, group in zip(waiting, all_groups, strict=True):
            if all(t.advantage is None for t in group.trajectories):
                self.counts["unusable"] += 1
                continue
            groups.append(group)
            views.append(item.views)
            kept.append(item.task)
        if len(groups) < world:
            self.counts["unusable"] += len(groups)
            return None
        self.counts["handed"] += len(groups)
        return Batch(self.step, groups, views, metrics=update_metrics(groups, kept, self.version))

    async def stepped(self, step: int, version: int) -> Stepped:
        """The learner applied update ``step`` and published ``version``: serve it everywhere and go on."""
        await self.fleet.load(version)
        async with self.changed:
            self.step, self.version, self.current = step + 1, version, None
            self.given.clear()
            self.counts["updates"] += 1
            self.changed.notify_all()
        return Stepped()

    async def keep(self) -> dict[str, Any]:
        """Nothing: what was not learnt from is not kept."""
        return {}

    # -- from the job -----------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take no more tasks; the learner gets what is queued, then None."""
        async with self.changed:
            self.draining = True
            self.changed.notify_all()

    async def stop(self) -> None:
        """End at once; queued tasks are given up and the learner gets None."""
        async with self.changed:
            self.stopped = True
            self.changed.notify_all()


async def _value(ref: ray.ObjectRef) -> Any:
    return await ref


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
