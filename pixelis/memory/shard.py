"""One shard of the experience memory: storing, searching, sampling, eviction."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.config import MemoryConfig
from pixelis.errors import BadInput
from pixelis.memory import portable
from pixelis.memory.database import Database
from pixelis.memory.index import TAIL, Index
from pixelis.memory.priority import keys, weights
from pixelis.memory.vectors import checked
from pixelis.records import Experience, Feedback

log = logging.getLogger(__name__)
DAY = 86_400.0
RETRIEVAL_DAYS = 7.0
"""Age at which a retrieval id is forgotten; a success told later counts as one of a retrieval of its own."""
PNG = b"\x89PNG\r\n\x1a\n"
COLUMNS = "id, status, priority, retrievals, successes, feedback, record"

Drawn = list[tuple[float, str]]
"""Keys of a draw and the ids drawn."""
Ids = list[str]
Victims = list[tuple[int, str]]
Experiences = list[Experience]
Row = tuple[str, str, float, int, int, str, str]
"""``COLUMNS`` of an experience: cheap to send; ``experience`` makes the record of it."""
Place = tuple[float, str]
"""Time and id of an experience: where it stands among all, newest first and by id at equal times."""


@dataclass(slots=True)
class Entry:
    """An experience to be stored: with its vector [d] (None: it is kept but never found) and pictures (PNG) by image id."""

    experience: Experience
    vector: np.ndarray | None = None
    pictures: dict[str, bytes] = field(default_factory=dict)


def experience(row: Row) -> Experience:
    """The record of a row: as it was stored, with what the memory knows of it since."""
    _, status, priority, retrievals, successes, feedback, record = row
    now = {"status": status, "priority": priority, "retrievals": retrievals, "successes": successes}
    stored = Experience.model_validate_json(record)
    return stored.model_copy(update={**now, "feedback": [Feedback.model_validate(one) for one in json.loads(feedback)]})


class Shard:
    """Experiences in a folder of their own; open in one process at a time, used from any number of threads.

    A method that writes returns when the change is on the disk. ``capacity`` is of this shard.
    """

    def __init__(self, folder: str | os.PathLike[str], config: MemoryConfig, capacity: int | None = None):
        self.folder, self.config = Path(folder), config
        self.capacity = config.capacity if capacity is None else capacity
        self.database = Database(self.folder)
        self.began = time.monotonic()
        self._index: Index | None = None
        self._ids: dict[int, str] = {}
        self._rows: dict[str, int] = {}
        self._since_save = 0
        self._offered, self._offering = 0, threading.Lock()
        """Entries that callers are adding: what the shard holds at most beyond what it is known to hold."""
        self._wake, self._stop = threading.Event(), threading.Event()
        try:
            self._recover()
        except BaseException:
            self.database.close()
            raise
        self.recovery_s = time.monotonic() - self.began
        self._keeper = threading.Thread(target=self._keep, name="memory-keeper", daemon=True)
        self._keeper.start()
        self._wake.set()

    # --- opening, housekeeping, closing -------------------------------------------------------------------------------------

    @property
    def _index_file(self) -> Path:
        return self.folder / "index.built"

    def _recover(self) -> None:
        self.name = self.database.fact("name") or ""
        with self.database.read() as rows:
            self._ids = dict(rows.execute("SELECT seq, id FROM experiences").fetchall())
            self._rows = {name: seq for seq, name in self._ids.items()}
            first = rows.execute("SELECT length(vector) FROM vectors LIMIT 1").fetchone()
            if first is None:
                return
            index = self._index = Index(self.config, first[0] // 4)
            present = np.fromiter((seq for (seq,) in rows.execute("SELECT seq FROM vectors")), np.int64)
            index.load(self._index_file, self.name, present)
            known = index.built.places if index.built is not None else {}
            cursor = rows.execute("SELECT seq, vector FROM vectors")
            while chunk := cursor.fetchmany(4096):
                chunk = [(seq, blob) for seq, blob in chunk if seq not in known]
                if chunk:
                    values = np.frombuffer(b"".join(blob for _, blob in chunk), "<f4").reshape(len(chunk), -1)
                    index.add([seq for seq, _ in chunk], values)

    def _keep(self) -> None:
        """The thread that maintains the index and writes its built part."""
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            try:
                self._settle()
            except Exception:
                # What is not built is searched one by one, and what is not saved is built again: nothing is lost.
                log.exception("the index of %s could not be maintained; the next change tries again", self.folder)

    def _settle(self) -> None:
        index = self._index
        if index is None or self.config.index == "flat":
            return
        before = index.built
        while not self._stop.is_set() and index.maintain(self._stop.is_set):
            self._since_save += 1
        if self._since_save and (index.built is not before or not self._index_file.exists() or self._since_save > TAIL // 16):
            index.save(self._index_file, self.name)
            self._since_save = 0

    def close(self) -> None:
        """Finish what is being written, keep the built index, let go of the folder."""
        self._stop.set()
        self._wake.set()
        self._keeper.join()
        if self._index is not None and self._since_save:
            self._index.save(self._index_file, self.name)
        self.database.close()

    # --- adding and finding -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, entries: Sequence[Entry]) -> list[bool]:
        """Store entries; True for each that is new, False for an id that is known. All are on the disk on return.

        When the shard is full the oldest (or the least) make room. BadInput, and nothing stored, for a vector that does not fit.
        """
        if not entries:
            return []
        for entry in entries:
            if entry.vector is not None:
                checked(np.asarray(entry.vector)[None], direction=self.config.metric == "cosine")
            for name, png in entry.pictures.items():
                if not png.startswith(PNG):
                    raise BadInput(f"picture {name!r} is no PNG", code="bad_image", fix="encode it as PNG")
        made = [(e, e.experience.model_dump_json(exclude={"feedback"})) for e in entries]

        def change(db: sqlite3.Connection) -> tuple[list[bool], list[tuple[int, Entry]], list[int]]:
            new, stored, out = [], [], []
            count = 0
            withdrawn = _withdrawn(db)
            if len(self._ids) + self._offered > self.capacity:  # counting takes long, and only a full shard needs it
                (count,) = db.execute("SELECT count(*) FROM experiences").fetchone()
            for entry, record in made:
                x = entry.experience
                if db.execute("SELECT 1 FROM experiences WHERE id = ?", (x.id,)).fetchone():
                    new.append(False)
                    continue
                over = count + 1 - self.capacity
                if over > 0:
                    order = "priority, seq" if self.config.evict == "priority" else "seq"
                    victims = [seq for (seq,) in db.execute(f"SELECT seq FROM experiences ORDER BY {order} LIMIT ?", (over,))]
                    db.executemany("DELETE FROM experiences WHERE seq = ?", [(seq,) for seq in victims])
                    out += victims
                    count -= len(victims)
                said = json.dumps([f.model_dump(mode="json") for f in x.feedback])
                status = "failed" if x.policy_version in withdrawn else x.status
                state = (status, x.priority, x.retrievals, x.successes, said, record)
                row = db.execute(
                    "INSERT INTO experiences (id, created_at, user, status, priority, retrievals, successes, feedback, record) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (x.id, x.created_at, x.user, *state),
                ).lastrowid
                assert row is not None
                if entry.vector is not None:
                    blob = np.ascontiguousarray(entry.vector, "<f4").tobytes()
                    (width,) = db.execute("SELECT length(vector) FROM vectors LIMIT 1").fetchone() or (len(blob),)
                    checked(np.asarray(entry.vector)[None], width // 4)
                    db.execute("INSERT INTO vectors VALUES (?, ?)", (row, blob))
                if self.config.pictures:
                    db.executemany("INSERT INTO pictures VALUES (?, ?, ?)", [(row, n, p) for n, p in entry.pictures.items()])
                new.append(True)
                stored.append((row, entry))
                count += 1
            return new, stored, out

        with self._offering:
            self._offered += len(entries)
        try:
            return self.database.write(change, self._added)[0]
        finally:
            with self._offering:
                self._offered -= len(entries)

    def _added(self, result: tuple[list[bool], list[tuple[int, Entry]], list[int]]) -> None:
        _, stored, out = result
        for row, entry in stored:
            self._ids[row] = entry.experience.id
            self._rows[entry.experience.id] = row
        indexed = [(row, np.asarray(e.vector, np.float32)) for row, e in stored if e.vector is not None]
        if indexed:
            if self._index is None or (not len(self._index) and self._index.width != len(indexed[0][1])):
                self._index = Index(self.config, len(indexed[0][1]))
            self._index.add([row for row, _ in indexed], np.stack([vector for _, vector in indexed]))
        self._gone(out)
        self._wake.set()

    def _gone(self, rows: Sequence[int], wipe: bool = False) -> None:
        for row in rows:
            self._rows.pop(self._ids.pop(row, ""), None)
        if self._index is not None and rows:
            self._index.remove(rows, wipe)
            if wipe:
                self._index_file.unlink(missing_ok=True)
                self._since_save += 1
            self._wake.set()

    def search(self, vectors: np.ndarray, k: int) -> list[list[tuple[str, float]]]:
        """Ids and similarity of the nearest of each of ``vectors`` [n, d], best first; all there are when fewer than ``k``.

        Similarity is the cosine, or the negative distance for the other metrics.
        """
        index = self._index
        if index is None or k < 1 or not len(index):
            return [[] for _ in range(len(vectors))]
        found, rows = index.search(vectors, min(k, len(index)))
        out = []
        for similarities, line in zip(found.tolist(), rows.tolist(), strict=True):
            named = ((self._ids.get(row), similarity) for similarity, row in zip(similarities, line, strict=True) if row >= 0)
            out.append([(name, similarity) for name, similarity in named if name is not None])
        return out

    # --- reading ------------------------------------------------------------------------------------------------------------

    def rows(self, ids: Sequence[str]) -> list[Row | None]:
        """The stored rows of these ids in order; None for an unknown one."""
        found: dict[str, Row] = {}
        with self.database.read() as db:
            for start in range(0, len(ids), 500):
                some = list(ids[start : start + 500])
                marks = ",".join("?" * len(some))
                for row in db.execute(f"SELECT {COLUMNS} FROM experiences WHERE id IN ({marks})", some).fetchall():
                    found[row[0]] = row
        return [found.get(name) for name in ids]

    def get(self, ids: Sequence[str]) -> list[Experience | None]:
        """The experiences of these ids in order; None for an unknown one."""
        return [experience(row) if row is not None else None for row in self.rows(ids)]

    def pictures(self, id: str) -> dict[str, bytes]:
        """PNG bytes by image id."""
        query = "SELECT name, png FROM pictures JOIN experiences USING (seq) WHERE id = ?"
        with self.database.read() as db:
            return dict(db.execute(query, (id,)).fetchall())

    def list_rows(self, limit: int, after: Place | None = None, user: str | None = None) -> list[tuple[float, Row]]:
        """Time and row of at most ``limit`` experiences, newest first; only those that come after ``after``, or of ``user``."""
        at, id = after or (float("inf"), "")
        wanted, values = ["(created_at < ? OR created_at = ? AND id > ?)"], [at, at, id]
        if user is not None:
            wanted.append("user = ?")
            values.append(user)
        query = f"SELECT created_at, {COLUMNS} FROM experiences WHERE {' AND '.join(wanted)} ORDER BY created_at DESC, id LIMIT ?"
        with self.database.read() as db:
            found = db.execute(query, [*values, max(0, limit)]).fetchall()
        return [(row[0], row[1:]) for row in found]

    def list(self, limit: int, after: Place | None = None, user: str | None = None) -> list[Experience]:
        """At most ``limit`` experiences, newest first; only those that come after ``after``, or of ``user``."""
        return [experience(row) for _, row in self.list_rows(limit, after, user)]

    def draw(self, n: int, rng: np.random.Generator) -> Drawn:
        """Keys and ids of a draw of at most ``n`` without replacement; see ``priority.keys``."""
        with self.database.read() as db:
            found = db.execute("SELECT id, priority, retrievals, successes FROM experiences ORDER BY seq").fetchall()
        if not found or n < 1:
            return []
        names, *columns = zip(*found, strict=True)
        times = keys(weights(*(np.asarray(column, float) for column in columns)), rng)
        first = np.argsort(times, kind="stable")[:n]
        return [(float(times[i]), names[i]) for i in first]

    def sample(self, n: int, rng: np.random.Generator) -> Experiences:
        """At most ``n`` experiences without replacement, by priority and success; see ``priority.weights``."""
        drawn = self.get([name for _, name in self.draw(n, rng)])
        return [one for one in drawn if one is not None]

    def stats(self) -> dict[str, Any]:
        """Counts, means and sizes, as plain values."""
        with self.database.read() as db:
            size, priority, retrievals, successes, newest, oldest = db.execute(
                "SELECT count(*), avg(priority), sum(retrievals), sum(successes), max(created_at), min(created_at) "
                "FROM experiences"
            ).fetchone()
            (added,) = db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'experiences'").fetchone()
        index = self._index
        return {
            "size": size,
            "capacity": self.capacity,
            "added": added,
            "vectors": len(index) if index is not None else 0,
            "width": index.width if index is not None else 0,
            "waiting_for_index": len(index.tail) if index is not None and self.config.index != "flat" else 0,
            "mean_priority": priority or 0.0,
            "retrievals": retrievals or 0,
            "successes": successes or 0,
            "newest": newest,
            "oldest": oldest,
            "bytes": self.database.nbytes(),
            "commits": self.database.commits,
            "recovery_s": self.recovery_s,
        }

    # --- what is learnt about an experience ---------------------------------------------------------------------------------

    def retrieved(self, retrieval: str, ids: Sequence[str]) -> None:
        """Count a retrieval of these experiences, once for each retrieval id."""

        def change(db: sqlite3.Connection) -> None:
            for row in filter(None, map(self._rows.get, ids)):
                _retrieved(db, row, retrieval)

        self.database.write(change)

    def succeeded(self, retrieval: str, ids: Sequence[str]) -> int:
        """Count that a retrieval of these experiences was of use, once for each retrieval id; returns how many were new."""

        def change(db: sqlite3.Connection) -> int:
            result = 0
            for row in filter(None, map(self._rows.get, ids)):
                _retrieved(db, row, retrieval)
                mark = "UPDATE retrievals SET succeeded = 1 WHERE seq = ? AND retrieval = ? AND succeeded = 0"
                if db.execute(mark, (row, retrieval)).rowcount:
                    db.execute("UPDATE experiences SET successes = successes + 1 WHERE seq = ?", (row,))
                    result += 1
            return result

        return self.database.write(change)

    def feedback(self, id: str, feedback: Feedback) -> Experience:
        """Add what somebody said (the same twice counts once); BadInput ``unknown_experience``."""
        said = feedback.model_dump(mode="json")

        def change(db: sqlite3.Connection) -> None:
            row = db.execute("SELECT feedback FROM experiences WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise unknown(id)
            known = json.loads(row[0])
            if said not in known:
                db.execute("UPDATE experiences SET feedback = ? WHERE id = ?", (json.dumps([*known, said]), id))

        self.database.write(change)
        (now,) = self.get([id])
        if now is None:
            raise unknown(id)
        return now

    def withdraw(self, versions: Sequence[int]) -> int:
        """Set the withdrawn policy versions: status ``failed`` for what they answered, or will be found to have answered.

        Such an experience votes no more. What a version answered that is no longer among them is ``pending`` again. Returns
        how many have failed by this.
        """

        def change(db: sqlite3.Connection) -> int:
            before = _withdrawn(db)
            if before == set(versions):
                return 0
            db.execute("INSERT OR REPLACE INTO facts VALUES ('withdrawn', ?)", (json.dumps(sorted(versions)),))
            mark = (
                "UPDATE experiences SET status = ? "
                "WHERE json_extract(record, '$.policy_version') IN (SELECT value FROM json_each(?))"
            )
            db.execute(mark, ("pending", json.dumps(sorted(before - set(versions)))))
            return db.execute(mark, ("failed", json.dumps(sorted(set(versions) - before)))).rowcount

        return self.database.write(change)

    # --- deleting -----------------------------------------------------------------------------------------------------------

    def delete(self, ids: Sequence[str]) -> int:
        """Delete by id: records, vectors, pictures, and their traces in the files. Returns how many there were."""
        return len(self._delete("id IN (SELECT value FROM json_each(?))", json.dumps(list(ids))))

    def delete_user(self, user: str) -> Ids:
        """Delete everything of a user (the stored pseudonym); returns the ids."""
        return self._delete("user = ?", user)

    def prune(self, now: float) -> Ids:
        """Delete what is older than ``retention_days``; returns the ids and adds a line to ``pruning.jsonl``."""
        out = self._delete("created_at < ?", now - self.config.retention_days * DAY)
        self.database.write(lambda db: db.execute("DELETE FROM retrievals WHERE told_at < ?", (now - RETRIEVAL_DAYS * DAY,)))
        if out:
            line = {"time": now, "retention_days": self.config.retention_days, "count": len(out), "ids": out}
            with open(self.folder / "pruning.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return out

    def _delete(self, where: str, value: Any) -> Ids:
        def change(db: sqlite3.Connection) -> Victims:
            victims = db.execute(f"SELECT seq, id FROM experiences WHERE {where} ORDER BY seq", (value,)).fetchall()
            db.executemany("DELETE FROM experiences WHERE seq = ?", [(seq,) for seq, _ in victims])
            return victims

        victims = self.database.write(change, lambda victims: self._gone([seq for seq, _ in victims], wipe=True))
        if victims:
            self.database.forget()
        return [name for _, name in victims]

    # --- moving -------------------------------------------------------------------------------------------------------------

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write everything to a Parquet file; returns how many experiences."""
        return portable.write(path, self._everything())

    def _everything(self) -> Iterator[portable.Chunk]:
        query = (
            f"SELECT seq, vector, {COLUMNS} FROM experiences LEFT JOIN vectors USING (seq) WHERE seq > ? ORDER BY seq LIMIT 500"
        )
        last = 0
        while True:
            with self.database.read() as db:
                found = db.execute(query, (last,)).fetchall()
                kept = []
                for seq, blob, *row in found:
                    pictures = dict(db.execute("SELECT name, png FROM pictures WHERE seq = ?", (seq,)).fetchall())
                    vector = np.frombuffer(blob, "<f4") if blob is not None else None
                    kept.append(portable.Kept(experience(tuple(row)), vector, pictures))
            if not kept:
                return
            last = found[-1][0]
            yield kept

    def load(self, path: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda id: True) -> int:
        """Add what a Parquet file of ``export`` holds and is not known here; returns how many. BadInput for another file.

        ``wanted`` says of an id whether it is for this shard.
        """
        added = 0
        for kept in portable.read(path):
            added += sum(self.add([Entry(k.experience, k.vector, k.pictures) for k in kept if wanted(k.experience.id)]))
        return added


def _withdrawn(db: sqlite3.Connection) -> set[int]:
    row = db.execute("SELECT value FROM facts WHERE name = 'withdrawn'").fetchone()
    return set(json.loads(row[0])) if row else set()


def unknown(id: str) -> BadInput:
    """The error for an id that is not there."""
    return BadInput(
        f"there is no experience {id!r}", code="unknown_experience", fix="it may have been deleted or pruned; list them"
    )


def _retrieved(db: sqlite3.Connection, row: int, retrieval: str) -> None:
    if db.execute("INSERT OR IGNORE INTO retrievals VALUES (?, ?, 0, ?)", (row, retrieval, time.time())).rowcount:
        db.execute("UPDATE experiences SET retrievals = retrievals + 1 WHERE seq = ?", (row,))
