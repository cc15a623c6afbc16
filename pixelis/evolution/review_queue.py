"""A durable queue of updates that wait for human review: the answers, the vote, and the task to learn from.

One SQLite file holds everything. Pictures and views are blobs named by their content hash, so samples of a
group share equal views. The task, whose tokens spell the text, is deleted when the update is rejected or
``done``; the redacted copy for people stays. The caller redacts question and verdict and strips the metadata
of pictures.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pixelis.config import RewardsConfig
from pixelis.errors import BadInput, InfraFailure
from pixelis.evolution.privacy import redact, redact_record
from pixelis.evolution.updates import relabel, unlabelled
from pixelis.memory.database import connect
from pixelis.records import Feedback, Question, Record, Trajectory, UpdateTask, Verdict
from pixelis.rewards.vote import agrees, contradicts

State = Literal["waiting", "approved", "rejected"]
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
CONTROL_TOKEN = re.compile(
    r"<\|[^<>|]*\|>|</?(?:think|answer|tool_call|tool_response|grounding)\b[^<>]*>", re.IGNORECASE
)
"""Tokens of chat templates and tags of dialects: in a label they would teach the policy to end or forge
turns.
"""
DISPUTED = "feedback calls the answer wrong"
"""Comment of a waiting review that no time may approve."""


class Review(Record):
    """An update with its review decision, if any. ``id`` is the task's id; times in seconds since the epoch.

    ``question`` has no truth and no data URL. ``answer`` is a reviewer's correction. ``task`` is redacted and
    has neither tokens nor log-probs: ``decide`` returns the task to learn from.
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


class ReviewQueue:
    """The queue in the SQLite file ``path``; thread-safe within one process.

    ``rewards`` score a task again when a reviewer corrects its label. Each decision removes the reviews
    decided more than ``keep_days`` before it. Every method raises InfraFailure ``review_queue`` when the file
    cannot be read or written.
    """

    def __init__(self, path: str | Path, rewards: RewardsConfig | None = None, keep_days: float = 90.0):
        self.path, self.rewards, self.keep_s = Path(path), rewards or RewardsConfig(), keep_days * 86_400
        self.lock = threading.RLock()
        with self._failures():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT, 0o600))
            self.store = connect(self.path, check_same_thread=False)
            self.store.row_factory = sqlite3.Row
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON"):
                self.store.execute(f"PRAGMA {pragma}")
            version = self.store.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA):
                raise InfraFailure(
                    f"{self.path} has schema {version} of the review queue, not {SCHEMA}",
                    code="schema_version",
                    fix="use the release that wrote it, or move the file away",
                )
            self.store.executescript(TABLES + f"PRAGMA user_version={SCHEMA};")

    def close(self) -> None:
        """Close the file."""
        with self.lock:
            self.store.close()

    # -- writing ---------------------------------------------------------------------------------------------

    def put(
        self,
        task: UpdateTask,
        verdict: Verdict,
        question: Question,
        pictures: Mapping[str, bytes],
        views: Mapping[str, Sequence[np.ndarray]],
    ) -> bool:
        """Store an update until it is decided; False when its id exists already. Durable on return.

        ``pictures`` are PNG bytes by image id of the shown trajectory; ``views`` uint8 arrays by trajectory
        id, one for each image. Raises BadInput ``missing_views`` and ``bad_view``.
        """
        blobs: dict[str, tuple[str, bytes]] = {}
        parts: list[tuple[str, str, str, int, str]] = []
        for name, png in pictures.items():
            parts.append((task.id, "picture", name, 0, _add_blob(blobs, "png", png)))
        for trajectory in task.trajectories:
            arrays = views.get(trajectory.id, ())
            if len(arrays) != len(trajectory.images):
                raise BadInput(
                    f"trajectory {trajectory.id} has {len(trajectory.images)} images and {len(arrays)} views",
                    code="missing_views",
                    fix="put the views that were generated with the task's trajectories",
                )
            for place, view in enumerate(arrays):
                if view.dtype != np.uint8:
                    raise BadInput(
                        f"a view is {view.dtype} {view.shape}, not uint8",
                        code="bad_view",
                        fix="put uint8 views",
                    )
                shape = ",".join(map(str, view.shape))
                parts.append((task.id, "view", trajectory.id, place, _add_blob(blobs, shape, view.tobytes())))
        media = [m.model_copy(update={"uri": f"stored:{m.id}", "frames": None}) for m in question.media]
        stored_question = unlabelled(question).model_copy(update={"media": media})
        redacted = [without_tokens(redact_record(trajectory)) for trajectory in task.trajectories]
        shown = task.model_copy(update={"trajectories": redacted, "pseudo_label": redact(task.pseudo_label)})
        records = (record.model_dump_json() for record in (stored_question, verdict, shown, task))
        with self._transaction():
            inserted = self.store.execute(
                "INSERT OR IGNORE INTO reviews (id, state, created_at, experience, question, verdict, "
                "shown, task)"
                " VALUES (?,'waiting',?,?,?,?,?,?)",
                (task.id, task.created_at, task.experience_id, *records),
            ).rowcount
            if not inserted:
                return False
            self.store.executemany(
                "INSERT OR IGNORE INTO blobs VALUES (?,?,?)", [(key, *blob) for key, blob in blobs.items()]
            )
            self.store.executemany("INSERT INTO parts VALUES (?,?,?,?,?)", parts)
        return True

    # -- reading ---------------------------------------------------------------------------------------------

    def reviews(self, state: State | None = "waiting", limit: int = 100) -> list[Review]:
        """At most ``limit`` reviews in this state (None: any), waiting ones oldest first, others newest
        first.
        """
        order = "created_at ASC, rowid ASC" if state == "waiting" else "created_at DESC, rowid DESC"
        rows = self._rows(
            f"SELECT {COLUMNS} FROM reviews WHERE ? IS NULL OR state = ? ORDER BY {order} LIMIT ?",
            (state, state, limit),
        )
        return [_review(row) for row in rows]

    def get(self, id: str) -> Review | None:
        """The review of this id; None when there is none."""
        rows = self._rows(f"SELECT {COLUMNS} FROM reviews WHERE id = ?", (id,))
        return _review(rows[0]) if rows else None

    def pictures(self, id: str) -> dict[str, bytes]:
        """PNG bytes by image id of the shown trajectory; empty for an unknown id."""
        return {row["name"]: row["data"] for row in self._parts(id, "picture")}

    def views(self, id: str) -> dict[str, list[np.ndarray]]:
        """The uint8 views by trajectory id, as they were put."""
        review = self.get(id)
        views: dict[str, list[np.ndarray]] = {t.id: [] for t in review.task.trajectories} if review else {}
        try:
            for row in self._parts(id, "view"):
                shape = [int(side) for side in row["shape"].split(",")]
                views[row["name"]].append(
                    np.frombuffer(zlib.decompress(row["data"]), np.uint8).reshape(shape).copy()
                )
        except (zlib.error, ValueError) as error:
            raise InfraFailure(
                f"a stored view is damaged: {error}", code="review_queue", fix="reject the update"
            ) from error
        return views

    def dispute(self, experience_id: str, feedback: Feedback) -> int:
        """Leave waiting reviews of an experience to a person if feedback calls their label wrong; returns
        their number.
        """
        rows = self._rows(
            f"SELECT {COLUMNS} FROM reviews WHERE state = 'waiting' AND experience = ?", (experience_id,)
        )
        wrong = [row["id"] for row in rows if contradicts(feedback, _review(row).task.pseudo_label)]
        with self._transaction():
            self.store.executemany(
                "UPDATE reviews SET comment = ? WHERE id = ?", [(DISPUTED, id) for id in wrong]
            )
        return len(wrong)

    def due(self, now: float, after_s: float) -> list[str]:
        """Ids of the updates that have waited ``after_s`` seconds or longer and are not disputed, oldest
        first.
        """
        sql = (
            "SELECT id FROM reviews WHERE state = 'waiting' AND comment = '' AND created_at <= ? ORDER "
            "BY created_at, rowid"
        )
        return [row["id"] for row in self._rows(sql, (now - after_s,))]

    def waiting(self) -> int:
        """Number of updates that wait."""
        return int(self._rows("SELECT count(*) AS n FROM reviews WHERE state = 'waiting'")[0]["n"])

    def stats(self) -> dict[str, float]:
        """Counts by state, of corrected reviews, mean seconds to a decision, bytes of stored pictures and
        views.
        """
        counts = {
            row["state"]: row["n"]
            for row in self._rows("SELECT state, count(*) AS n FROM reviews GROUP BY state")
        }
        decided = self._rows(
            "SELECT count(answer) AS corrected, coalesce(avg(decided_at - created_at), 0) AS wait FROM "
            "reviews"
            " WHERE state != 'waiting'"
        )[0]
        size = self._rows("SELECT coalesce(sum(length(data)), 0) AS n FROM blobs")[0]["n"]
        return {
            **{state: float(counts.get(state, 0)) for state in ("waiting", "approved", "rejected")},
            "corrected": float(decided["corrected"]),
            "mean_wait_s": float(decided["wait"]),
            "picture_bytes": float(size),
        }

    # -- decisions -------------------------------------------------------------------------------------------

    def decide(
        self,
        id: str,
        decision: Literal["approved", "rejected"],
        reviewer: str,
        comment: str = "",
        answer: str | None = None,
        now: float | None = None,
    ) -> UpdateTask | None:
        """Decide once, durably; returns the task to learn from, None if rejected or decided so before.

        If ``answer`` corrects the label, an approved task is scored again. Raises BadInput
        ``unknown_review``, ``bad_decision``, ``control_token`` for a label that spells one, and
        ``already_decided`` if the earlier decision differs; then nothing changes.
        """
        if decision not in ("approved", "rejected"):
            raise BadInput(f"`{decision}` is no decision", code="bad_decision", fix="approved or rejected")
        now = time.time() if now is None else now
        answer = (answer or "").strip() or None
        if answer is not None and (token := CONTROL_TOKEN.search(answer)):
            raise BadInput(
                (
                    f"the answer spells the control token {token.group():.60}, which no policy may learn to "
                    "write in an answer"
                ),
                code="control_token",
                fix="give the answer as text alone",
            )
        stored_answer = redact(answer) if answer else None
        review = self._existing(id)
        if review.state == "waiting":
            task = self.task(id) if decision == "approved" else None
            if task is not None and answer is not None and not agrees(answer, task.pseudo_label):
                task = relabel(task, review.question, answer, self.rewards)
            with self._transaction():
                changed = self.store.execute(
                    "UPDATE reviews SET state=?, decided_at=?, reviewer=?, comment=?, answer=?, task=?"
                    " WHERE id=? AND state='waiting'",
                    (
                        decision,
                        now,
                        reviewer,
                        redact(comment),
                        stored_answer,
                        task and task.model_dump_json(),
                        id,
                    ),
                ).rowcount
            if changed:
                self.prune(now - self.keep_s)
                self._truncate_wal()
                return task
            review = self._existing(id)  # another thread decided first
        same_answer = (
            agrees(review.answer, stored_answer) if stored_answer is not None else review.answer is None
        )
        if review.state != decision or not same_answer:
            earlier = review.state + (f" with the answer {review.answer!r:.80}" if review.answer else "")
            raise BadInput(
                f"review {id} was already {earlier} by {review.reviewer or 'somebody'}",
                code="already_decided",
                fix="a decision is final: roll the policy back if it was wrong",
            )
        return None

    def _existing(self, id: str) -> Review:
        review = self.get(id)
        if review is None:
            raise BadInput(
                f"no review {id:.80}", code="unknown_review", fix="take an id from the list of reviews"
            )
        return review

    def approved(self) -> list[str]:
        """Ids of the approved updates that are not ``done``, in the order of decisions."""
        sql = "SELECT id FROM reviews WHERE state='approved' AND task NOTNULL ORDER BY decided_at, rowid"
        return [row["id"] for row in self._rows(sql)]

    def task(self, id: str) -> UpdateTask | None:
        """The task to learn from, with the reviewer's correction once approved; None when it was removed."""
        rows = self._rows("SELECT task FROM reviews WHERE id = ? AND task NOTNULL", (id,))
        return UpdateTask.model_validate_json(rows[0]["task"]) if rows else None

    def done(self, ids: Sequence[str]) -> None:
        """Remove the tasks of these approved updates, which were learnt from or given up."""
        with self._transaction():
            sql = "UPDATE reviews SET task=NULL WHERE id=? AND state='approved' AND task NOTNULL"
            count = sum(self.store.execute(sql, (id,)).rowcount for id in ids)
        if count:
            self._truncate_wal()

    # -- removing --------------------------------------------------------------------------------------------

    def forget(self, experience_ids: Sequence[str]) -> int:
        """Remove the reviews of these experiences, decided or not, with their pictures; returns their
        number.
        """
        return self._remove("experience = ?", [(id,) for id in experience_ids if id])

    def prune(self, before: float) -> int:
        """Remove the reviews decided before this time (seconds since the epoch), with their pictures; returns
        their number.
        """
        return self._remove("state != 'waiting' AND decided_at < ?", [(before,)])

    def _remove(self, where: str, values: Sequence[tuple[Any, ...]]) -> int:
        with self._transaction():
            count = sum(
                self.store.execute(f"DELETE FROM reviews WHERE {where}", value).rowcount for value in values
            )
            self.store.execute("DELETE FROM blobs WHERE hash NOT IN (SELECT hash FROM parts)")
        if count:
            self._truncate_wal()
        return count

    def _truncate_wal(self) -> None:
        """Remove deleted data from the write-ahead log too."""
        self._rows("PRAGMA wal_checkpoint(TRUNCATE)")

    # -- SQLite ----------------------------------------------------------------------------------------------

    def _rows(self, sql: str, values: tuple = ()) -> list[sqlite3.Row]:
        with self._failures(), self.lock:
            return self.store.execute(sql, values).fetchall()

    def _parts(self, id: str, kind: str) -> list[sqlite3.Row]:
        sql = (
            "SELECT name, shape, data FROM parts JOIN blobs USING (hash) WHERE review = ? AND kind = ? "
            "ORDER BY name, place"
        )
        return self._rows(sql, (id, kind))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """One atomic transaction, on disk when the block ends."""
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
                fix="check the disk and its free space; move a damaged file away",
            ) from error


def _add_blob(blobs: dict[str, tuple[str, bytes]], shape: str, data: bytes) -> str:
    """Add a blob under the hash of shape and content, which is returned; arrays are compressed, PNG is
    not.
    """
    key = hashlib.sha256(shape.encode() + b"\0" + data).hexdigest()
    if key not in blobs:
        blobs[key] = (shape, data if shape == "png" else zlib.compress(data, 1))
    return key


def without_tokens(trajectory: Trajectory) -> Trajectory:
    """A copy without token ids and log-probs."""
    turns = [turn.model_copy(update={"tokens": [], "log_probs": []}) for turn in trajectory.turns]
    return trajectory.model_copy(update={"turns": turns})


def _review(row: sqlite3.Row) -> Review:
    values = {key: row[key] for key in row.keys() if key != "shown"}  # noqa: SIM118 - a row iterates over values
    question = Question.model_validate_json(row["question"])
    verdict = Verdict.model_validate_json(row["verdict"])
    task = UpdateTask.model_validate_json(row["shown"])
    return Review(**values | {"question": question, "verdict": verdict, "task": task})
