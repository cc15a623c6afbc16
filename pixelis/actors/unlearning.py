"""Exact unlearning: repeats the updates since a deleted experience without it, from a state before it.

Source of the idea of replaying from a checkpoint without the deleted data: SISA (Bourtoule et al.,
arXiv 1912.03817).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from pixelis.actors.group_views import UpdatePictures, fetch
from pixelis.actors.promotion import AuditWriter, Promotion
from pixelis.actors.rollouts import RolloutBatch
from pixelis.actors.update_queue import QueuedTask
from pixelis.config import Config
from pixelis.evolution.journal import Journal, JournalTask, Repetition, Update
from pixelis.evolution.updates import as_group
from pixelis.policy import checkpoint
from pixelis.policy.advantages import assign_advantages

REPEATING, DUE = "repeating", "due_at"
"""Facts of the journal: the last update of those being repeated, and when a deletion is to be unlearnt."""
RETRY_S = 60.0
"""Seconds until a repetition that could not be judged begins anew."""


class Unlearning:
    """Records the learner's updates in ``run.dir/updates.db``; ``evolution.unlearn_s`` after a deletion repeats them.

    A repetition goes through KL guard and canary, which refuses it only for a fall of accuracy; then the versions
    that it replaces are removed. If a process ends meanwhile, the repetition begins anew.
    """

    def __init__(self, config: Config, promotion: Promotion, pictures: UpdatePictures, note: AuditWriter):
        self.promotion, self.pictures, self.note = promotion, pictures, note
        self.after_s, self.advantage = config.evolution.unlearn_s or 0.0, config.rft.advantage
        self.retention_s = config.memory.retention_days * 86_400
        self.phases = Path(config.run.dir) / "phases"
        self.journal = Journal(Path(config.run.dir) / "updates.db")
        self.due_at = time.time() if self.is_unfinished else self.journal.fact(DUE)
        self.head: int | None = None
        """Id of the update that made the learner's weights; None if it is not recorded."""
        self.saved_at = 0.0
        """When the last checkpoint that a repetition may start from was made, or the first update."""
        self.repetition: Repetition | None = None
        self.actions: list[tuple[Update | None, bool]] = []
        """What the learner does in the repetition: an update, or only publish; with a fresh optimizer or not."""
        self.place = self.served = 0
        self.published: list[int] = []
        self.tasks: list[JournalTask] = []
        """Of the learner's update."""

    def begin(self, step: int) -> None:
        """The learner (re)starts at ``step``."""
        self.repetition = None
        self._set_head(self.journal.last_before(step))
        if self.is_unfinished:
            self.due_at = time.time()

    @property
    def is_unfinished(self) -> bool:
        """Whether a repetition runs or must begin anew before any other update."""
        return self.journal.fact(REPEATING) is not None

    def _set_head(self, head: Update | None) -> None:
        self.head = head.id if head is not None else None
        path = self.journal.ancestry(head)
        saved = [update.created_at for update in path if update.checkpoint]
        self.saved_at = saved[-1] if saved else path[0].created_at if path else 0.0

    # -- every update

    def must_reset(self, step: int) -> bool:
        """Whether the learner's weights have a history that is not recorded, so that none could be repeated."""
        return self.head is None and step > 0 and self.promotion.restore is None

    async def record(
        self,
        batch: RolloutBatch,
        new: Sequence[QueuedTask],
        rehearsed: Sequence[QueuedTask],
        forgotten: Container[str],
    ) -> str | None:
        """Record an update that was made; returns the name of a checkpoint to be made of the state after it.

        ``forgotten``: ids of deleted experiences, some of which the learner may have had by then.
        """
        name = await asyncio.to_thread(self._record, batch, new, rehearsed)
        experiences = {id for item in self.tasks for id in item.task.experience_ids}
        self.forget([id for id in experiences if id in forgotten])
        head = self.journal.get(self.head)
        if head is not None and head.parent is None and head.origin is not None:
            await self.promotion.store.pin.remote(head.origin)
        return name

    def _record(
        self, batch: RolloutBatch, new: Sequence[QueuedTask], rehearsed: Sequence[QueuedTask]
    ) -> str | None:
        if self.repetition is None:
            items = [*new, *rehearsed]
            views = fetch([item.views for item in items])
            pairs = zip(items, views, strict=True)
            self.tasks = [JournalTask(i.task, v, n >= len(new)) for n, (i, v) in enumerate(pairs)]
        origin, parent = batch.restore, self.journal.get(self.head)
        if origin is not None:
            parent = self.journal.of_version(origin)
        elif batch.resume is not None and self.repetition is not None:
            parent = self.repetition.start
        elif parent is None:
            origin = self.promotion.base
        id = self.journal.add(
            parent.id if parent is not None else None, origin, batch.step, batch.options, self.tasks
        )
        self.head, now = id, time.time()
        self.saved_at = self.saved_at or now
        if self.repetition is not None or now - self.saved_at < self.retention_s / 2:
            return None
        self.saved_at, name = now, f"update-{id:08d}"
        self.journal.set_checkpoint(id, name)
        return name

    def publish(self, version: int) -> None:
        """The learner published its weights as ``version``."""
        if self.head is not None:
            self.journal.set_version(self.head, version)

    # -- deletions

    def forget(self, experience_ids: Sequence[str]) -> int:
        """Delete what was recorded of experiences; the weights lose it ``evolution.unlearn_s`` later."""
        count = self.journal.forget(experience_ids)
        if count and self.due_at is None:
            self._set_due(time.time() + self.after_s)
        return count

    def _set_due(self, at: float | None) -> None:
        self.due_at = at
        self.journal.set_fact(DUE, at)

    def expire(self) -> None:
        if self.repetition is None:
            self._remove_checkpoints(self.journal.expire(self._last(), time.time() - self.retention_s))

    def _last(self) -> Update | None:
        """The last update of the weights that the learner goes on from."""
        if (id := self.journal.fact(REPEATING)) is not None:
            return self.journal.get(int(id))
        restore = self.promotion.restore
        return self.journal.get(self.head) if restore is None else self.journal.of_version(restore)

    def wait_s(self) -> float | None:
        """Seconds until a repetition is due, 0 while one runs; None if none is."""
        if self.repetition is not None:
            return 0.0
        return None if self.due_at is None else max(0.0, self.due_at - time.time())

    # -- repetition

    async def next_batch(self, step: int) -> RolloutBatch | None:
        """The next update of a repetition that is due or runs; None if there is none."""
        if self.wait_s() != 0:
            return None
        if self.repetition is None:
            await self._plan()
        return await asyncio.to_thread(self._batch, step) if self.repetition is not None else None

    async def _plan(self) -> None:
        last = self._last()
        repetition = await asyncio.to_thread(self.journal.repetition, last, self._has_checkpoint)
        self.journal.set_fact(REPEATING, last.id if last is not None and repetition is not None else None)
        self._set_due(None)
        if repetition is None:
            await self._remove_tainted()
            return
        if repetition.start is None and repetition.origin is None:
            cause = "no state from before the deleted tasks is stored"
            await self._end("refused", {"cause": cause, "replaced": len(repetition.path)})
            return
        self.repetition, self.place, self.served = repetition, 0, self.promotion.served
        self.promotion.restore = None  # the first update begins from other weights
        self.published, self.actions = [], list(repetition.updates)
        # The weights of the start itself are needed where it has nothing after it, or a fresh optimizer
        if not self.actions or (repetition.start is not None and self.actions[0][1]):
            self.actions.insert(0, (None, False))

    def _has_checkpoint(self, name: str) -> bool:
        return checkpoint.latest(self.phases / name) is not None

    def _batch(self, step: int) -> RolloutBatch:
        assert self.repetition is not None
        (update, is_fresh), is_last = self.actions[self.place], self.place + 1 == len(self.actions)
        self.tasks = self.journal.tasks(update.id) if update is not None else []
        groups = [as_group(item.task) for item in self.tasks]
        new = [group for group, item in zip(groups, self.tasks, strict=True) if not item.rehearsed]
        if new:
            assign_advantages(new, self.advantage)
        batch = RolloutBatch(step, groups, [self.pictures.hold(item.views) for item in self.tasks])
        batch.options = update.options if update is not None else {}
        batch.publish = is_last or self.actions[self.place + 1][1]
        if self.place:
            batch.restore = self.published[-1] if is_fresh else None
        elif self.repetition.start is None:
            batch.restore = self.repetition.origin
        else:
            folder = self.phases / (self.repetition.start.checkpoint or "")
            batch.resume = str(checkpoint.latest(folder, verify=False))
        return batch

    async def advance(self, version: int | None) -> bool:
        """The learner has made the update of ``next_batch`` and published ``version``; True if it serves now."""
        self.place += 1
        if version is not None:
            self.publish(version)
            self.published.append(version)
        if self.place < len(self.actions) or version is None:
            return False
        repetition = self.repetition
        assert repetition is not None
        details: dict[str, Any] = {
            "from": {"update": repetition.start and repetition.start.id, "version": repetition.origin},
            "replaced": len(repetition.path),
            "repeated": len(repetition.updates),
            "incomplete": [update.step for update in repetition.path if update.incomplete],
            "version": version,
        }
        if promoted := await self._serve(version):
            await self._remove_tainted()
            outcome = "success"
        elif version in self.promotion.withdrawn:
            outcome = "refused"
        else:  # the canary failed, or another version was promoted or rolled back to
            is_outdated = self.promotion.served != self.served
            self._set_due(time.time() + (0.0 if is_outdated else RETRY_S))
            outcome = "skipped" if is_outdated else "failure"
        await self._end(outcome, details)
        return promoted

    async def _serve(self, version: int) -> bool:
        if await self.promotion.offer(version, replaces=True):
            return True
        if not await self.promotion.was_promoted(version):
            return False
        # The repeated updates lead to an earlier version
        return (await self.promotion.promote(version, "unlearning", force=True))["promoted"]

    async def _remove_tainted(self) -> None:
        """Remove all updates and versions that learnt from deleted tasks, also those that were never served."""
        updates = self.journal.tainted()
        versions = {update.version for update in updates if update.version is not None}
        await self.promotion.unlearn(sorted(versions - {self.promotion.served}))
        self._remove_checkpoints(self.journal.remove([update.id for update in updates]))

    def _remove_checkpoints(self, names: Sequence[str]) -> None:
        for name in names:
            shutil.rmtree(self.phases / name, ignore_errors=True)

    async def _end(self, outcome: str, details: dict[str, Any]) -> None:
        if outcome != "failure":
            self.journal.set_fact(REPEATING, None)
        self.repetition = None
        self._set_head(self.journal.get(self.head))
        await self.note("unlearning", "evolution", "repeat", outcome, details)

    def stats(self) -> dict[str, float]:
        """``due_s``: seconds until a repetition begins, -1 without a deletion to unlearn."""
        wait_s, is_running = self.wait_s(), self.repetition is not None
        return {
            "due_s": -1.0 if wait_s is None else wait_s,
            "repeated": float(self.place if is_running else 0),
            "updates": float(len(self.actions) if is_running else 0),
        }
