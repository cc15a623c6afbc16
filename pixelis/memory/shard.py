"""One shard of the experience memory: storage, search, sampling, eviction."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.config import MemoryConfig
from pixelis.errors import BadInput, DataFailure
from pixelis.files import disk_failures
from pixelis.memory import portable
from pixelis.memory.database import Database
from pixelis.memory.index import Index
from pixelis.memory.portable import Entry
from pixelis.memory.rows import WORD, Place, Row, Rows, experience
from pixelis.memory.schema import CHECKED, add_picture, checksum, content_hash, digest, set_fact
from pixelis.records import Experience, Feedback
from pixelis.records.vectors import validate

log = logging.getLogger(__name__)
DAY = 86_400.0
RETRIEVAL_DAYS = 7.0
"""Age at which a retrieval id is deleted; a success reported later counts as a new retrieval."""
PNG = b"\x89PNG\r\n\x1a\n"
CHECKSUM = checksum(CHECKED["experiences"])
MAX_FEEDBACK = 32
"""Most feedback entries of an experience."""


class Shard:
    """Experiences in one folder, which one process may open at a time. Thread-safe.

    Writing methods return when the change is on disk.
    """

    def __init__(self, folder: str | os.PathLike[str], config: MemoryConfig, capacity: int | None = None):
        self.folder, self.config = Path(folder), config
        self.capacity = config.capacity if capacity is None else capacity
        started = time.monotonic()
        self.database = Database(self.folder, accept_loss=config.on_loss == "continue")
        self.stored = Rows(self.database)
        self._index: Index | None = None
        self._ids: dict[int, str] = {}
        self._rows: dict[str, int] = {}
        try:
            self._recover()
        except BaseException:
            self.database.close()
            raise
        self.recovery_s = time.monotonic() - started

    def _recover(self) -> None:
        """Read the ids, and build the index from the vectors."""
        (self.folder / "index.built").unlink(missing_ok=True)  # of version 0.1.0: it may have deleted vectors
        with self.database.read() as rows:
            self._ids = dict(rows.execute("SELECT seq, id FROM experiences").fetchall())
            self._rows = {name: seq for seq, name in self._ids.items()}
            cursor = rows.execute("SELECT seq, vector FROM vectors ORDER BY seq")
            while chunk := cursor.fetchmany(4096):
                seqs, blobs = zip(*chunk, strict=True)
                if self._index is None:
                    self._index = Index(self.config, len(blobs[0]) // 4)
                self._index.add(seqs, np.frombuffer(b"".join(blobs), "<f4").reshape(len(blobs), -1))
        if self._index is not None:
            self._index.build()

    def close(self) -> None:
        self.database.close()

    # -- adding and searching

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, entries: Sequence[Entry]) -> list[bool]:
        """Store entries; returns True for each new one, False for each existing id.

        Raises BadInput for an invalid vector or picture; then nothing is stored.
        """
        if not entries:
            return []
        for entry in entries:
            if entry.vector is not None:
                validate(np.asarray(entry.vector)[None], direction=self.config.metric == "cosine")
            for name, png in entry.pictures.items():
                if not png.startswith(PNG):
                    raise BadInput(f"picture {name!r} is not a PNG", code="bad_image", fix="encode it as PNG")
        # Outside the transaction, because these take long.
        records = [entry.experience.model_dump_json(exclude={"feedback"}) for entry in entries]
        pictures = [
            [(name, content_hash(png), png) for name, png in entry.pictures.items() if self.config.pictures]
            for entry in entries
        ]
        order = "priority, seq" if self.config.evict == "priority" else "seq"
        to_evict = f"SELECT seq FROM experiences ORDER BY {order} LIMIT ?"

        def change(db: sqlite3.Connection) -> tuple[list[bool], list[tuple[int, Entry]], list[int]]:
            new, stored, evicted = [], [], []
            withdrawn = _withdrawn(db)
            (count,) = db.execute("SELECT count(*) FROM experiences").fetchone()
            for entry, record, shown in zip(entries, records, pictures, strict=True):
                known = db.execute(
                    "SELECT 1 FROM experiences WHERE id = ?", (entry.experience.id,)
                ).fetchone()
                new.append(not known)
                if not known:
                    victims = db.execute(to_evict, (max(0, count + 1 - self.capacity),)).fetchall()
                    db.executemany("DELETE FROM experiences WHERE seq = ?", victims)
                    count += 1 - len(victims)
                    evicted += [seq for (seq,) in victims]
                    row = _insert(db, entry, record, withdrawn)
                    for picture in shown:
                        add_picture(db, row, *picture)
                    stored.append((row, entry))
            return new, stored, evicted

        return self.database.write(change, self._apply_added)[0]

    def _apply_added(self, result: tuple[list[bool], list[tuple[int, Entry]], list[int]]) -> None:
        _, stored, evicted = result
        for row, entry in stored:
            self._ids[row] = entry.experience.id
            self._rows[entry.experience.id] = row
        indexed = [(row, np.asarray(e.vector, np.float32)) for row, e in stored if e.vector is not None]
        if indexed:
            if self._index is None or (not len(self._index) and self._index.width != len(indexed[0][1])):
                self._index = Index(self.config, len(indexed[0][1]))
            self._index.add([row for row, _ in indexed], np.stack([vector for _, vector in indexed]))
        self._apply_removed(evicted)

    def _apply_removed(self, rows: Sequence[int]) -> None:
        for row in rows:
            name = self._ids.pop(row, "")
            if self._rows.get(name) == row:  # else it was added again in the same call
                del self._rows[name]
        if self._index is not None:
            self._index.remove(rows)

    def search(
        self, vectors: np.ndarray, k: int, user: str | None = None, text: str = ""
    ) -> list[list[tuple[str, float]]]:
        """Ids and similarities of the ``k`` nearest neighbours of each of ``vectors`` [n, d], best first.

        Similarity is the cosine, or the negative distance for other metrics. ``user`` is as in ``list_rows``;
        ``text`` leaves out experiences that lack one of its words in question and answer.
        """
        words = WORD.findall(text.casefold())
        if user is None and not words:
            return self._nearest(vectors, k)
        wanted, breadth = self.stored.matching(user, words), k
        while True:  # the index knows neither users nor words: search wider until enough of the nearest match
            near = [
                [pair for pair in line if pair[0] in wanted][:k] for line in self._nearest(vectors, breadth)
            ]
            if breadth >= len(self._rows) or all(len(line) >= min(k, len(wanted)) for line in near):
                return near
            breadth *= 4

    def _nearest(self, vectors: np.ndarray, k: int) -> list[list[tuple[str, float]]]:
        index = self._index
        if index is None or k < 1 or not len(index):
            return [[] for _ in range(len(vectors))]
        scores, rows = index.search(vectors, min(k, len(index)))
        out = []
        for similarities, line in zip(scores.tolist(), rows.tolist(), strict=True):
            named = (
                (self._ids.get(row), similarity)
                for similarity, row in zip(similarities, line, strict=True)
                if row >= 0
            )
            out.append([(name, similarity) for name, similarity in named if name is not None])
        return out

    # -- reading

    def rows(self, ids: Sequence[str]) -> list[Row | None]:
        """The rows of these ids in order; None for an unknown id and for a damaged row."""
        seqs = [seq for seq in map(self._rows.get, ids) if seq is not None]
        by_id = {row[0]: row for _, row in self.stored.experiences(seqs)}
        return [by_id.get(name) for name in ids]

    def row(self, id: str) -> Row | None:
        """The row of this id, if known. Raises DataFailure ``damaged``."""
        (row,) = self.rows([id])
        if row is None and id in self._rows:
            raise DataFailure(
                f"the experience {id} is damaged on disk",
                code="damaged",
                fix="repair it from an export: docs/memory.md",
            )
        return row

    def get(self, ids: Sequence[str]) -> list[Experience | None]:
        return [experience(row) if row is not None else None for row in self.rows(ids)]

    def pictures(self, id: str) -> dict[str, bytes]:
        """PNG bytes by image id."""
        seq = self._rows.get(id)
        return {} if seq is None else self.stored.pictures([seq]).get(seq, {})

    def list_rows(
        self, limit: int, after: Place | None = None, user: str | None = None
    ) -> list[tuple[float, Row]]:
        """Times and rows of experiences, newest first; a ``user`` that ends in a dot is a prefix."""
        return self.stored.page(limit, after, user)

    def draw(self, n: int, rng: np.random.Generator, status: str | None = None) -> list[tuple[float, str]]:
        """Keys and ids of at most ``n`` experiences, drawn by weight, without replacement.

        Weight: the priority, times .7 + .3 success rate if retrieved before. Keys are exponential arrival
        times with the weights as rates, so the smallest keys of several shards are a sample over all of them.
        Source: Efraimidis and Spirakis, Weighted random sampling with a reservoir (2006).
        """
        with self.database.read() as db:
            columns = "SELECT id, priority, retrievals, successes FROM experiences"
            rows = db.execute(
                f"{columns} WHERE ? IS NULL OR status = ? ORDER BY seq", (status, status)
            ).fetchall()
        if not rows or n < 1:
            return []
        names, *numbers = zip(*rows, strict=True)
        priorities, retrievals, successes = (np.asarray(column, float) for column in numbers)
        rate = successes / np.maximum(retrievals, 1)
        times = rng.exponential(size=len(names)) / np.where(
            retrievals > 0, priorities * (0.7 + 0.3 * rate), priorities
        )
        first = np.argsort(times, kind="stable")[:n]
        return [(float(times[i]), names[i]) for i in first]

    @property
    def refusal(self) -> str:
        """Why nothing is stored at present, a code of ``pixelis.files``; empty if it is."""
        return self.database.refusal

    @property
    def damaged(self) -> int:
        """Number of experiences that the last start found damaged or lost; 1 if it is only their feedback."""
        if (result := self.database.salvaged) is None:
            return 0
        parts = {*result.without_vector, *result.without_pictures}
        return result.lost + len(parts) or min(1, result.changes)

    def stats(self) -> dict[str, Any]:
        with self.database.read() as db:
            size, priority, retrievals, successes, newest, oldest = db.execute(
                "SELECT count(*), avg(priority), sum(retrievals), sum(successes), max(created_at), "
                "min(created_at) FROM experiences"
            ).fetchone()
            (added,) = db.execute(
                "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'experiences'"
            ).fetchone()
        index = self._index
        return {
            "size": size,
            "capacity": self.capacity,
            "added": added,
            "vectors": len(index) if index is not None else 0,
            "width": index.width if index is not None else 0,
            "mean_priority": priority or 0.0,
            "retrievals": retrievals or 0,
            "successes": successes or 0,
            "newest": newest,
            "oldest": oldest,
            "bytes": self.database.nbytes(),
            "commits": self.database.commits,
            "recovery_s": self.recovery_s,
            "refusal": self.refusal,
            "damaged": self.damaged,
        }

    # -- retrievals, feedback, withdrawals

    def retrieved(self, retrieval: str, ids: Sequence[str]) -> None:
        """Count a retrieval of these experiences, once per retrieval id."""

        def change(db: sqlite3.Connection) -> None:
            for row in filter(None, map(self._rows.get, ids)):
                _count_retrieval(db, row, retrieval)

        self.database.write(change)

    def succeeded(self, retrieval: str, ids: Sequence[str]) -> int:
        """Count a successful retrieval of these experiences, once per retrieval id; returns how many."""

        def change(db: sqlite3.Connection) -> int:
            result = 0
            for row in filter(None, map(self._rows.get, ids)):
                _count_retrieval(db, row, retrieval)
                mark = "UPDATE retrievals SET succeeded = 1 WHERE seq = ? AND retrieval = ? AND succeeded = 0"
                if db.execute(mark, (row, retrieval)).rowcount:
                    db.execute("UPDATE experiences SET successes = successes + 1 WHERE seq = ?", (row,))
                    result += 1
            return result

        return self.database.write(change)

    def feedback(self, id: str, feedback: Feedback) -> Experience:
        """Add feedback. Raises BadInput ``unknown_experience`` and ``feedback_full``."""
        entry = feedback.model_dump(mode="json")

        def change(db: sqlite3.Connection) -> None:
            row = db.execute("SELECT feedback FROM experiences WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise unknown(id)
            existing = json.loads(row[0])
            if entry not in existing:
                if len(existing) >= MAX_FEEDBACK:
                    raise BadInput(
                        f"the experience {id!r} has {MAX_FEEDBACK} entries of feedback already",
                        code="feedback_full",
                        fix="delete the experience if its answer is wrong",
                    )
                db.execute(
                    "UPDATE experiences SET feedback = ? WHERE id = ?", (json.dumps([*existing, entry]), id)
                )

        self.database.write(change)
        (updated,) = self.get([id])
        if updated is None:
            raise unknown(id)
        return updated

    def withdraw(self, versions: Sequence[int]) -> int:
        """Set the withdrawn policy versions; returns the number of experiences that became ``failed``.

        Later experiences of theirs do too; those of versions that are no longer withdrawn become ``pending``.
        """

        def change(db: sqlite3.Connection) -> int:
            previous = _withdrawn(db)
            if previous == set(versions):
                return 0
            set_fact(db, "withdrawn", json.dumps(sorted(versions)))
            mark = (
                "UPDATE experiences SET status = ? "
                "WHERE json_extract(record, '$.policy_version') IN (SELECT value FROM json_each(?))"
            )
            db.execute(mark, ("pending", json.dumps(sorted(previous - set(versions)))))
            return db.execute(mark, ("failed", json.dumps(sorted(set(versions) - previous)))).rowcount

        return self.database.write(change)

    def learnt(self, ids: Sequence[str]) -> int:
        """Mark pending experiences of which an update was made as ``processed``; returns their number."""
        mark = (
            "UPDATE experiences SET status = 'processed' "
            "WHERE status = 'pending' AND id IN (SELECT value FROM json_each(?))"
        )
        return self.database.write(lambda db: db.execute(mark, (json.dumps(list(ids)),)).rowcount)

    # -- deleting

    def delete(self, ids: Sequence[str]) -> int:
        """Delete experiences without leaving traces in the files; returns the number deleted."""
        return len(self._delete("id IN (SELECT value FROM json_each(?))", json.dumps(list(ids))))

    def delete_user(self, user: str) -> list[str]:
        return self._delete("user = ?", user)

    def prune(self, now: float) -> list[str]:
        """Delete experiences older than ``retention_days``, noted in ``pruning.jsonl``; returns their ids."""
        before = now - self.config.retention_days * DAY
        pruned = self._delete("created_at < ?", before, copies_before=before)
        self.database.write(
            lambda db: db.execute("DELETE FROM retrievals WHERE told_at < ?", (now - RETRIEVAL_DAYS * DAY,))
        )
        if pruned:
            line: dict[str, Any] = {"time": now, "retention_days": self.config.retention_days}
            line |= {"count": len(pruned), "ids": pruned}
            path = self.folder / "pruning.jsonl"
            with disk_failures(self.folder), open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return pruned

    def _delete(self, condition: str, value: Any, copies_before: float = np.inf) -> list[str]:
        def change(db: sqlite3.Connection) -> list[tuple[int, str]]:
            chosen = f"SELECT seq, id FROM experiences WHERE {condition} ORDER BY seq"
            victims = db.execute(chosen, (value,)).fetchall()
            db.executemany("DELETE FROM experiences WHERE seq = ?", [(seq,) for seq, _ in victims])
            return victims

        victims = self.database.write(change, lambda gone: self._apply_removed([seq for seq, _ in gone]))
        if victims:
            self.database.forget()
        # A damaged file may have what is deleted, and what nobody can name any more
        for copy in self.folder.glob("damaged-*"):
            if victims or copy.stat().st_mtime < copies_before:
                copy.unlink()
        return [name for _, name in victims]

    # -- export, import

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write all experiences to a Parquet file; returns their number."""
        return portable.write(path, self.stored.entries(sorted(self._ids)))

    def load(self, path: str | os.PathLike[str], accepts: Callable[[str], bool] = lambda id: True) -> int:
        """Add the experiences of a file of ``export`` whose ids are new and accepted; returns their number.

        Raises BadInput for another kind of file.
        """
        chunks = ([e for e in entries if accepts(e.experience.id)] for entries in portable.read(path))
        return sum(sum(self.add(entries)) for entries in chunks)


def _insert(db: sqlite3.Connection, entry: Entry, record: str, withdrawn: set[int]) -> int:
    x = entry.experience
    feedback = json.dumps([f.model_dump(mode="json") for f in x.feedback])
    status = "failed" if x.policy_version in withdrawn else x.status
    row = db.execute(
        "INSERT INTO experiences (id, created_at, user, status, priority, retrievals, successes, feedback, "
        "record) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (x.id, x.created_at, x.user, status, x.priority, x.retrievals, x.successes, feedback, record),
    ).lastrowid
    assert row is not None
    db.execute(f"UPDATE experiences SET checksum = {CHECKSUM} WHERE seq = ?", (row,))
    if entry.vector is not None:
        blob = np.ascontiguousarray(entry.vector, "<f4").tobytes()
        (width,) = db.execute("SELECT length(vector) FROM vectors LIMIT 1").fetchone() or (len(blob),)
        validate(np.asarray(entry.vector)[None], width // 4)
        db.execute("INSERT INTO vectors VALUES (?, ?, ?)", (row, blob, digest(row, blob)))
    return row


def _withdrawn(db: sqlite3.Connection) -> set[int]:
    row = db.execute("SELECT value FROM facts WHERE name = 'withdrawn'").fetchone()
    return set(json.loads(row[0])) if row else set()


def unknown(id: str) -> BadInput:
    return BadInput(
        f"there is no experience {id!r}",
        code="unknown_experience",
        fix="it may have been deleted or pruned: list the experiences",
    )


def _count_retrieval(db: sqlite3.Connection, row: int, retrieval: str) -> None:
    if db.execute(
        "INSERT OR IGNORE INTO retrievals VALUES (?, ?, 0, ?)", (row, retrieval, time.time())
    ).rowcount:
        db.execute("UPDATE experiences SET retrievals = retrievals + 1 WHERE seq = ?", (row,))
