"""A durable queue of updates that wait for a person: the answers, the vote, and what would be learnt.

One SQLite file (WAL, synchronous=FULL): what ``put`` or ``decide`` returned from survives a killed process. Pictures and views
are blobs named by their content, so that what the samples of a group share is kept once. Only JSON and bytes of known shape are
read back.

What people see is redacted, and kept; what the learner needs, tokens that spell what was said, is kept while it waits and goes
when it is rejected or ``done``. The caller redacts the question and the verdict and strips pictures of their metadata.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from pixelis.config import RewardsConfig
from pixelis.errors import BadInput, InfraFailure
from pixelis.evolution.privacy import redact, redact_experience
from pixelis.evolution.updates import relabel, unlabelled
from pixelis.evolution.vote import agrees
from pixelis.records import Experience, Question, Record, Trajectory, UpdateTask, Verdict

State = Literal["waiting", "approved", "rejected"]
Rows = list[sqlite3.Row]
Views = list[np.ndarray]
Ids = list[str]
SCHEMA = 1
TABLES = """
CREATE TABLE IF NOT EXISTS reviews (
    id TEXT PRIMARY KEY, state TEXT NOT NULL, created_at REAL NOT NULL, experience TEXT NOT NULL,
    question TEXT NOT NULL, verdict TEXT NOT NULL, shown TEXT NOT NULL, task TEXT,
    decided_at REAL, reviewer TEXT NOT NULL DEFAULT '', comment TEXT NOT NULL DEFAULT '', answer TEXT
);
CREATE INDEX IF NOT EXISTS by_state ON reviews (state, created_at);
CREATE TABLE IF NOT EXISTS blobs (hash TEXT PRIMARY KEY, shape TEXT NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS parts (
    review TEXT NOT NULL REFERENCES reviews (id) ON DELETE CASCADE, kind TEXT NOT NULL, name TEXT NOT NULL,
    place INTEGER NOT NULL, hash TEXT NOT NULL REFERENCES blobs (hash), PRIMARY KEY (review, kind, name, place)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_hash ON parts (hash);
"""
COLUMNS = "id, state, created_at, question, verdict, shown, decided_at, reviewer, comment, answer"
MAX_VIEW_BYTES = 1 << 30
"""Largest view that is read back: a damaged shape must not ask for all memory."""


class Review(Record):
    """An update that waits for a person, or what was decided of it. ``id`` is that of its task; times since the epoch.

    ``question`` carries no truth and no data URL. ``answer`` is a reviewer's correction. ``task`` is redacted and has neither
    tokens nor log-probs: ``decide`` gives the one to learn from.
    """

    id: str
    state: State
    created_at: float
    question: Question
    verdict: Verdict
    task: UpdateTask
    decided_at: float | None = None
    reviewer: str = ""
    comment: str = ""
    answer: str | None = None


Reviews = list[Review]


class ReviewQueue:
    """The queue in the SQLite file ``path``. Safe to use from many threads of one process.

    ``rewards`` score a task anew when a reviewer corrects its label; what was decided ``keep_days`` ago goes with the next
    decision. InfraFailure when the file cannot be written or read.
    """

    def __init__(self, path: str | Path, rewards: RewardsConfig | None = None, keep_days: float = 90.0):
        self.path, self.rewards, self.keep_s = Path(path), rewards or RewardsConfig(), keep_days * 86_400
        self.lock = threading.RLock()
        with self._failures():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.store = sqlite3.connect(self.path, timeout=30.0, check_same_thread=False)
            self.store.row_factory = sqlite3.Row
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON"):
                self.store.execute(f"PRAGMA {pragma}")
            version = self.store.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA):
                raise InfraFailure(
                    f"{self.path} has version {version} of the review queue, not {SCHEMA}",
                    code="schema_version",
                    fix="run the release that wrote it, or move the file away",
                )
            self.store.executescript(TABLES + f"PRAGMA user_version={SCHEMA};")

    def close(self) -> None:
        """Close the file."""
        with self.lock:
            self.store.close()

    # -- in ---------------------------------------------------------------------------------------------------------

    def put(
        self,
        task: UpdateTask,
        verdict: Verdict,
        question: Question,
        pictures: Mapping[str, bytes],
        views: Mapping[str, Sequence[np.ndarray]],
    ) -> bool:
        """Keep an update until somebody decides; False when it is known already. Durable on return.

        ``pictures`` are PNG bytes by image id of the trajectory shown; ``views`` uint8 arrays by trajectory id, all that the
        learner needs. BadInput when a trajectory of the task lacks its views.
        """
        for trajectory in task.trajectories:
            if (seen := len(views.get(trajectory.id, ()))) != len(trajectory.images):
                raise BadInput(
                    f"trajectory {trajectory.id} has {len(trajectory.images)} images and {seen} views",
                    code="missing_views",
                    fix="put the views that were generated with the task's trajectories",
                )
        blobs: dict[str, tuple[str, bytes]] = {}
        parts: list[tuple[str, str, str, int, str]] = []
        for name, png in pictures.items():
            parts.append((task.id, "picture", name, 0, _keep(blobs, "png", png)))
        for trajectory in task.trajectories:
            for place, view in enumerate(views.get(trajectory.id, ())):
                if view.dtype != np.uint8 or view.nbytes > MAX_VIEW_BYTES:
                    raise BadInput(f"a view is {view.dtype} {view.shape}, not uint8", code="bad_view", fix="put uint8 views")
                shape = ",".join(map(str, view.shape))
                parts.append((task.id, "view", trajectory.id, place, _keep(blobs, shape, np.ascontiguousarray(view).tobytes())))
        row = (
            *(task.id, "waiting", task.created_at, task.experience_id),
            *(record.model_dump_json() for record in (_portable(question), verdict, _shown(task, question, verdict), task)),
        )
        with self._transaction():
            known = self.store.execute("SELECT 1 FROM reviews WHERE id = ?", (task.id,)).fetchone()
            if known:
                return False
            columns = "id, state, created_at, experience, question, verdict, shown, task"
            self.store.execute(f"INSERT INTO reviews ({columns}) VALUES (?,?,?,?,?,?,?,?)", row)
            self.store.executemany("INSERT OR IGNORE INTO blobs VALUES (?,?,?)", [(key, *blob) for key, blob in blobs.items()])
            self.store.executemany("INSERT INTO parts VALUES (?,?,?,?,?)", parts)
        return True

    # -- out --------------------------------------------------------------------------------------------------------

    def list(self, state: State | None = "waiting", limit: int = 100) -> Reviews:
        """At most ``limit`` reviews in this state (None: any), the oldest first where they wait, else the newest first."""
        order = "created_at ASC, rowid ASC" if state == "waiting" else "created_at DESC, rowid DESC"
        rows = self._rows(
            f"SELECT {COLUMNS} FROM reviews WHERE ? IS NULL OR state = ? ORDER BY {order} LIMIT ?", (state, state, limit)
        )
        return [_review(row) for row in rows]

    def get(self, id: str) -> Review | None:
        """The review of this id, None when there is none."""
        rows = self._rows(f"SELECT {COLUMNS} FROM reviews WHERE id = ?", (id,))
        return _review(rows[0]) if rows else None

    def pictures(self, id: str) -> dict[str, bytes]:
        """PNG bytes by image id of what the shown trajectory saw; empty for an unknown id."""
        return {row["name"]: _read(row) for row in self._parts(id, "picture")}

    def views(self, id: str) -> dict[str, Views]:
        """The uint8 views by trajectory id, as they were put. InfraFailure when the file is damaged."""
        review = self.get(id)
        out: dict[str, Views] = {t.id: [] for t in review.task.trajectories} if review else {}
        for row in self._parts(id, "view"):
            shape = tuple(int(side) for side in row["shape"].split(",")) if row["shape"] else ()
            out[row["name"]].append(np.frombuffer(_read(row, math.prod(shape)), np.uint8).reshape(shape).copy())
        return out

    def due(self, now: float, approve_after_s: float | None) -> Ids:
        """Ids of what has waited ``approve_after_s`` seconds or longer, the oldest first; none when that is None."""
        if approve_after_s is None:
            return []
        sql = "SELECT id FROM reviews WHERE state = 'waiting' AND created_at <= ? ORDER BY created_at, rowid"
        return [row["id"] for row in self._rows(sql, (now - approve_after_s,))]

    def waiting(self) -> int:
        """How many wait."""
        return int(self._rows("SELECT count(*) AS n FROM reviews WHERE state = 'waiting'")[0]["n"])

    def stats(self) -> dict[str, float]:
        """Counts by state, corrected ones, the mean seconds to a decision, bytes kept."""
        counts = {row["state"]: row["n"] for row in self._rows("SELECT state, count(*) AS n FROM reviews GROUP BY state")}
        told = self._rows(
            "SELECT count(answer) AS corrected, coalesce(avg(decided_at - created_at), 0) AS wait FROM reviews"
            " WHERE state != 'waiting'"
        )[0]
        size = self._rows("SELECT coalesce(sum(length(data)), 0) AS n FROM blobs")[0]["n"]
        return {
            **{state: float(counts.get(state, 0)) for state in ("waiting", "approved", "rejected")},
            "corrected": float(told["corrected"]),
            "mean_wait_s": float(told["wait"]),
            "picture_bytes": float(size),
        }

    # -- decisions --------------------------------------------------------------------------------------------------

    def decide(
        self,
        id: str,
        decision: Literal["approved", "rejected"],
        reviewer: str,
        comment: str = "",
        answer: str | None = None,
        now: float | None = None,
    ) -> UpdateTask | None:
        """Decide once; the task to learn from, or None when nothing is: rejected, or the same decision was made before.

        With an ``answer`` an approved task is scored anew against it: the correction is its label. Durable on return. BadInput
        ``unknown_review``, ``bad_decision``, and ``already_decided`` when it was decided otherwise; nothing changes then.
        """
        if decision not in ("approved", "rejected"):
            raise BadInput(f"`{decision}` is no decision", code="bad_decision", fix="approved or rejected")
        now = time.time() if now is None else now
        corrected = answer.strip() or None if answer is not None else None
        kept = redact(corrected) if corrected else None
        review = self._known(id)
        if review.state == "waiting":
            task = self._decided(review, decision, corrected)
            values = (decision, now, reviewer, redact(comment), kept, task and task.model_dump_json(), id)
            with self._transaction():
                changed = self.store.execute(
                    "UPDATE reviews SET state=?, decided_at=?, reviewer=?, comment=?, answer=?, task=?"
                    " WHERE id=? AND state='waiting'",
                    values,
                ).rowcount
            if changed:
                self.prune(now - self.keep_s)
                self._empty_log()
                return task
            review = self._known(id)  # somebody was faster
        if review.state != decision or _differ(review.answer, kept):
            what = review.state + (f" with the answer {review.answer!r:.80}" if review.answer else "")
            raise BadInput(
                f"review {id} was {what} by {review.reviewer or 'somebody'} already",
                code="already_decided",
                fix="a decision stands: roll the policy back if it was wrong",
            )
        return None

    def _decided(self, review: Review, decision: str, answer: str | None) -> UpdateTask | None:
        if decision == "rejected":
            return None
        task = self.task(review.id)
        if task is None:  # decided meanwhile: the caller will see
            return None
        if answer is None or agrees(answer, task.pseudo_label):
            return task
        return relabel(task, review.question, answer, self.rewards)

    def _known(self, id: str) -> Review:
        review = self.get(id)
        if review is None:
            raise BadInput(f"no review {id:.80}", code="unknown_review", fix="take an id from the list of reviews")
        return review

    def approved(self) -> Ids:
        """Ids of what was approved and is not ``done``, the first decided first."""
        sql = "SELECT id FROM reviews WHERE state='approved' AND task NOTNULL ORDER BY decided_at, rowid"
        return [row["id"] for row in self._rows(sql)]

    def task(self, id: str) -> UpdateTask | None:
        """What the learner gets, with a reviewer's correction once it is approved; None when that is gone."""
        rows = self._rows("SELECT task FROM reviews WHERE id = ? AND task NOTNULL", (id,))
        return UpdateTask.model_validate_json(rows[0]["task"]) if rows else None

    def done(self, ids: Sequence[str]) -> None:
        """These approved ones were learnt from or given up: what only the learner needs goes."""
        with self._transaction():
            sql = "UPDATE reviews SET task=NULL WHERE id=? AND state='approved' AND task NOTNULL"
            count = sum(self.store.execute(sql, (id,)).rowcount for id in ids)
        if count:
            self._empty_log()

    # -- forgetting -------------------------------------------------------------------------------------------------

    def forget(self, experience_ids: Sequence[str]) -> int:
        """Remove the reviews of these experiences, decided or not, with their pictures; returns how many."""
        return self._remove("experience = ?", [(id,) for id in experience_ids if id])

    def prune(self, before: float) -> int:
        """Remove what was decided before this time (seconds since the epoch), with its pictures; returns how many."""
        return self._remove("state != 'waiting' AND decided_at < ?", [(before,)])

    def _remove(self, where: str, values: Sequence[tuple]) -> int:
        with self._transaction():
            count = sum(self.store.execute(f"DELETE FROM reviews WHERE {where}", value).rowcount for value in values)
            self.store.execute("DELETE FROM blobs WHERE hash NOT IN (SELECT hash FROM parts)")
        if count:
            self._empty_log()
        return count

    def _empty_log(self) -> None:
        """What was removed is not to be found in the write-ahead log either."""
        self._rows("PRAGMA wal_checkpoint(TRUNCATE)")

    # -- SQLite -----------------------------------------------------------------------------------------------------

    def _rows(self, sql: str, values: tuple = ()) -> Rows:
        with self._failures(), self.lock:
            return self.store.execute(sql, values).fetchall()

    def _parts(self, id: str, kind: str) -> Rows:
        sql = "SELECT name, shape, data FROM parts JOIN blobs USING (hash) WHERE review = ? AND kind = ? ORDER BY name, place"
        return self._rows(sql, (id, kind))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, on disk when it ends."""
        with self._failures(), self.lock, self.store:
            self.store.execute("BEGIN IMMEDIATE")
            yield

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise InfraFailure(
                f"the review queue {self.path} failed: {error}",
                code="review_queue",
                fix="check the disk and its space; a damaged file must be moved away",
            ) from error


def _keep(blobs: dict[str, tuple[str, bytes]], shape: str, data: bytes) -> str:
    """Add a blob under the hash of its shape and content; PNG stays as it is, arrays are compressed."""
    key = hashlib.sha256(shape.encode() + b"\0" + data).hexdigest()
    if key not in blobs:
        blobs[key] = (shape, data if shape == "png" else zlib.compress(data, 1))
    return key


def _read(row: sqlite3.Row, size: int | None = None) -> bytes:
    """The bytes of a blob; of an array exactly ``size``."""
    if size is None:
        return bytes(row["data"])
    try:
        if size > MAX_VIEW_BYTES:
            raise zlib.error(f"{size} bytes")
        decoder = zlib.decompressobj()
        data = decoder.decompress(row["data"], size + 1)
        if len(data) != size:
            raise zlib.error(f"{len(data)} bytes instead of {size}")
    except zlib.error as error:
        raise InfraFailure(f"a stored view is damaged: {error}", code="review_queue", fix="reject the update") from error
    return data


def _portable(question: Question) -> Question:
    """The question without truth, and without pictures inside it."""
    media = [m.model_copy(update={"uri": f"stored:{m.id}", "frames": None}) for m in question.media]
    return unlabelled(question).model_copy(update={"media": media})


def _shown(task: UpdateTask, question: Question, verdict: Verdict) -> UpdateTask:
    """The task as people see it: redacted, without tokens and log-probs."""

    def shown(trajectory: Trajectory) -> Trajectory:
        whole = Experience(question=question, trajectory=trajectory, verdict=verdict, policy_version=0, created_at=0.0)
        clean = redact_experience(whole).trajectory
        turns = [turn.model_copy(update={"tokens": [], "log_probs": []}) for turn in clean.turns]
        return clean.model_copy(update={"turns": turns})

    trajectories = [shown(trajectory) for trajectory in task.trajectories]
    return task.model_copy(update={"trajectories": trajectories, "pseudo_label": redact(task.pseudo_label)})


def _review(row: sqlite3.Row) -> Review:
    return Review(
        id=row["id"],
        state=row["state"],
        created_at=row["created_at"],
        question=Question.model_validate_json(row["question"]),
        verdict=Verdict.model_validate_json(row["verdict"]),
        task=UpdateTask.model_validate_json(row["shown"]),
        decided_at=row["decided_at"],
        reviewer=row["reviewer"],
        comment=row["comment"],
        answer=row["answer"],
    )


def _differ(a: str | None, b: str | None) -> bool:
    return not agrees(a, b) if b is not None else a is not None
