"""A durable journal of updates: what each learnt from and began with, so that it can be repeated without some tasks.

Updates form a tree, because the learner may return to an earlier version. The weights after an update are
those after its ``parent``, or the published weights of version ``origin`` with a fresh optimizer, and its step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.evolution.sqlite_file import DELETE_UNUSED_BLOBS, Blobs, SqliteFile, add_array, array_of
from pixelis.records import UpdateTask

TABLES = """
CREATE TABLE IF NOT EXISTS updates (
    id INTEGER PRIMARY KEY AUTOINCREMENT, parent INTEGER, origin INTEGER, step INTEGER NOT NULL,
    options TEXT NOT NULL, created_at REAL NOT NULL, version INTEGER, checkpoint TEXT, incomplete INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS tasks (
    id INTEGER PRIMARY KEY, update_id INTEGER NOT NULL REFERENCES updates (id) ON DELETE CASCADE,
    rehearsed INTEGER NOT NULL, experiences TEXT NOT NULL, task TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_update ON tasks (update_id);
CREATE TABLE IF NOT EXISTS parts (
    task INTEGER NOT NULL REFERENCES tasks (id) ON DELETE CASCADE, trajectory TEXT NOT NULL,
    place INTEGER NOT NULL, hash TEXT NOT NULL REFERENCES blobs (hash), PRIMARY KEY (task, trajectory, place)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_hash ON parts (hash);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value REAL NOT NULL);
"""
TASKS_LEFT = "(SELECT count(*) FROM tasks WHERE update_id = updates.id)"
UPDATES = (
    "SELECT id, parent, origin, step, options, created_at, version, checkpoint, incomplete,"
    f" {TASKS_LEFT} AS tasks FROM updates"
)


@dataclass(frozen=True, slots=True)
class Update:
    """``tasks``: number of those left; ``incomplete``: some were deleted; ``checkpoint``: its folder's name."""

    id: int
    parent: int | None
    origin: int | None
    step: int
    options: dict[str, float]
    created_at: float
    version: int | None
    checkpoint: str | None
    incomplete: bool
    tasks: int


@dataclass(frozen=True, slots=True)
class JournalTask:
    """A task with its uint8 views by trajectory id; a ``rehearsed`` one has no advantage."""

    task: UpdateTask
    views: dict[str, list[np.ndarray]]
    rehearsed: bool


@dataclass(frozen=True, slots=True)
class Repetition:
    """``updates`` to repeat in the place of those of ``path``, each with whether its optimizer is fresh.

    They begin from the checkpoint of ``start``, or without one from the published weights of version ``origin``.
    """

    start: Update | None
    origin: int | None
    updates: list[tuple[Update, bool]]
    path: list[Update]


class Journal(SqliteFile):
    def __init__(self, path: str | Path):
        super().__init__(path, TABLES, "journal")

    # -- writing

    def add(
        self,
        parent: int | None,
        origin: int | None,
        step: int,
        options: dict[str, float],
        tasks: Sequence[JournalTask],
        now: float | None = None,
    ) -> int:
        """Add the update made in the learner's step ``step``, durably; returns its id."""
        with self._transaction():
            cursor = self.store.execute(
                "INSERT INTO updates (parent, origin, step, options, created_at) VALUES (?,?,?,?,?)",
                (parent, origin, step, json.dumps(options), time.time() if now is None else now),
            )
            id = int(cursor.lastrowid or 0)
            for item in tasks:
                experiences = json.dumps(sorted(item.task.experience_ids))
                row = id, item.rehearsed, experiences, item.task.model_dump_json()
                sql = "INSERT INTO tasks (update_id, rehearsed, experiences, task) VALUES (?,?,?,?)"
                key, blobs = self.store.execute(sql, row).lastrowid, Blobs()
                parts = [
                    (key, name, place, add_array(blobs, view))
                    for name, views in item.views.items()
                    for place, view in enumerate(views)
                ]
                self._put(blobs)
                self.store.executemany("INSERT INTO parts VALUES (?,?,?,?)", parts)
        return id

    def set_version(self, id: int, version: int) -> None:
        with self._transaction():
            self.store.execute("UPDATE updates SET version = ? WHERE id = ?", (version, id))

    def set_checkpoint(self, id: int, name: str) -> None:
        with self._transaction():
            self.store.execute("UPDATE updates SET checkpoint = ? WHERE id = ?", (name, id))

    def set_fact(self, name: str, value: float | None) -> None:
        """A fact that survives restarts; None removes it."""
        with self._transaction():
            self.store.execute("DELETE FROM facts WHERE name = ?", (name,))
            if value is not None:
                self.store.execute("INSERT INTO facts VALUES (?,?)", (name, value))

    def fact(self, name: str) -> float | None:
        rows = self._rows("SELECT value FROM facts WHERE name = ?", (name,))
        return rows[0]["value"] if rows else None

    # -- reading

    def last_before(self, step: int) -> Update | None:
        """The newest update, or its newest ancestor made before step ``step`` of the learner."""
        rows = self._rows(f"{UPDATES} ORDER BY id DESC LIMIT 1")
        update = _update(rows[0]) if rows else None
        while update is not None and update.step >= step:
            update = self.get(update.parent)
        return update

    def get(self, id: int | None) -> Update | None:
        rows = self._rows(f"{UPDATES} WHERE id = ?", (id,))
        return _update(rows[0]) if rows else None

    def of_version(self, version: int) -> Update | None:
        """The newest update that published a version; None if it is not recorded."""
        rows = self._rows(f"{UPDATES} WHERE version = ? ORDER BY id DESC LIMIT 1", (version,))
        return _update(rows[0]) if rows else None

    def ancestry(self, update: Update | None) -> list[Update]:
        """An update and all that its weights descend from, oldest first."""
        path = list[Update]()
        while update is not None:
            path.append(update)
            update = self.get(update.parent)
        return path[::-1]

    def tainted(self) -> list[Update]:
        """The updates whose weights have learnt from deleted tasks."""
        result = dict[int, Update]()
        for update in map(_update, self._rows(f"{UPDATES} ORDER BY id")):
            if update.incomplete or update.parent in result:
                result[update.id] = update
        return list(result.values())

    def tasks(self, id: int) -> list[JournalTask]:
        """The tasks of an update that are left, in their order."""
        result = []
        for row in self._rows("SELECT id, rehearsed, task FROM tasks WHERE update_id = ? ORDER BY id", (id,)):
            task = UpdateTask.model_validate_json(row["task"])
            views: dict[str, list[np.ndarray]] = {t.id: [] for t in task.trajectories}
            stored = "SELECT trajectory, shape, data FROM parts JOIN blobs USING (hash) WHERE task = ?"
            for part in self._rows(f"{stored} ORDER BY trajectory, place", (row["id"],)):
                views[part["trajectory"]].append(array_of(part))
            result.append(JournalTask(task, views, bool(row["rehearsed"])))
        return result

    def repetition(self, last: Update | None, is_complete: Callable[[str], bool]) -> Repetition | None:
        """How to repeat the ancestry of ``last`` from before the first deleted task; None if none was deleted.

        It starts from the last checkpoint before it that ``is_complete``, and leaves out updates without tasks.
        """
        path = self.ancestry(last)
        first = next((i for i, update in enumerate(path) if update.incomplete), None)
        if first is None:
            return None
        names = [update.checkpoint for update in path[:first]]
        start = max((i for i, name in enumerate(names) if name and is_complete(name)), default=None)
        after, updates, is_fresh = path if start is None else path[start + 1 :], [], start is None
        for update in after:
            is_fresh |= update.origin is not None
            if update.tasks:
                updates.append((update, is_fresh))
                is_fresh = False
        origin = path[0].origin if start is None else None
        return Repetition(None if start is None else path[start], origin, updates, after)

    # -- removing

    def forget(self, experience_ids: Sequence[str]) -> int:
        """Delete the tasks of these experiences; returns their number. Their updates become incomplete."""
        has_experience = (
            "EXISTS (SELECT 1 FROM json_each(experiences) WHERE value IN (SELECT value FROM json_each(?)))"
        )
        ids = json.dumps([id for id in experience_ids if id])
        with self._transaction():
            self.store.execute(
                f"UPDATE updates SET incomplete = 1 WHERE id IN (SELECT update_id FROM tasks WHERE {has_experience})",
                (ids,),
            )
            count = self.store.execute(f"DELETE FROM tasks WHERE {has_experience}", (ids,)).rowcount
            self.store.execute(DELETE_UNUSED_BLOBS)
        if count:
            self._truncate_wal()
        return count

    def remove(self, ids: Sequence[int]) -> list[str]:
        """Remove updates with their tasks; returns the names of their checkpoints."""
        chosen = "id IN (SELECT value FROM json_each(?))"
        values = (json.dumps(list(ids)),)
        names = self._rows(f"SELECT checkpoint FROM updates WHERE checkpoint NOTNULL AND {chosen}", values)
        with self._transaction():
            self.store.execute(f"DELETE FROM updates WHERE {chosen}", values)
            self.store.execute(DELETE_UNUSED_BLOBS)
        self._truncate_wal()
        return [row["checkpoint"] for row in names]

    def expire(self, last: Update | None, before: float) -> list[str]:
        """Remove what is older than ``before``: names of the checkpoints that are not needed any more.

        Updates between two checkpoints go together, or the later ones could not be repeated.
        """
        rows = self._rows("SELECT id FROM updates WHERE created_at < ?", (before,))
        old = {row["id"] for row in rows}
        path = self.ancestry(last)
        expired = [i for i, update in enumerate(path) if update.id in old]
        if expired:
            following = range(expired[-1], len(path))
            end = next((i for i in following if path[i].checkpoint), None)
            old |= {update.id for update in path[: (expired[-1] if end is None else end) + 1]}
            if end is not None:  # its checkpoint is where repetitions begin; without it there is no beginning
                old.remove(root := path[end].id)
                with self._transaction():
                    self.store.execute("DELETE FROM tasks WHERE update_id = ?", (root,))
                    self.store.execute(
                        "UPDATE updates SET parent = NULL, origin = NULL, incomplete = 0 WHERE id = ?",
                        (root,),
                    )
        return self.remove(sorted(old)) if old else []


def _update(row: Any) -> Update:
    values = dict(row)
    return Update(
        **{**values, "options": json.loads(values["options"]), "incomplete": bool(values["incomplete"])}
    )
