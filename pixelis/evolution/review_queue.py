"""A durable queue of updates that wait for human review, in one SQLite file.

Pictures and views are blobs named by their content hash, so samples of a group share equal views. The task,
whose tokens spell the text, is deleted when the update is rejected or ``done``; the redacted copy for people
stays.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pixelis.config import RewardsConfig
from pixelis.errors import BadInput
from pixelis.evolution.privacy import redact, redact_record
from pixelis.evolution.sqlite_file import DELETE_UNUSED_BLOBS, Blobs, SqliteFile, add_array, add_png, array_of
from pixelis.evolution.updates import relabel, speaking_for, unlabelled
from pixelis.records import Feedback, Question, Record, Trajectory, UpdateTask, Verdict
from pixelis.rewards.vote import agrees, contradicts

State = Literal["waiting", "approved", "rejected"]
TABLES = """
CREATE TABLE IF NOT EXISTS reviews (
    id TEXT PRIMARY KEY, state TEXT NOT NULL, created_at REAL NOT NULL, experience TEXT NOT NULL,
    question TEXT NOT NULL, verdict TEXT NOT NULL, shown TEXT NOT NULL, task TEXT,
    decided_at REAL, reviewer TEXT NOT NULL DEFAULT '', comment TEXT NOT NULL DEFAULT '', answer TEXT
);
CREATE INDEX IF NOT EXISTS by_state ON reviews (state, created_at);
CREATE TABLE IF NOT EXISTS parts (
    review TEXT NOT NULL REFERENCES reviews (id) ON DELETE CASCADE, kind TEXT NOT NULL, name TEXT NOT NULL,
    place INTEGER NOT NULL, hash TEXT NOT NULL REFERENCES blobs (hash), PRIMARY KEY (review, kind, name, place)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_hash ON parts (hash);
"""
SELECT = "SELECT id, state, created_at, question, verdict, shown, decided_at, reviewer, comment, answer FROM reviews"
HAS_EXPERIENCE = "(experience = ?1 OR ?1 IN (SELECT value FROM json_each(shown, '$.experiences')))"
CONTROL_TOKEN = re.compile(
    r"<\|[^<>|]*\|>|</?(?:think|answer|tool_call|tool_response|grounding)\b[^<>]*>", re.IGNORECASE
)
"""In a label, tokens of chat templates and tags of dialects would teach the policy to end or forge turns."""
DISPUTED = "feedback calls the answer wrong"
"""Comment of a waiting review that no time may approve."""


class Review(Record):
    """An update with its decision, if any. ``id`` is the task's, times in seconds since the epoch.

    ``question`` has no truth, ``task`` is redacted and has no tokens; ``answer`` is a reviewer's correction.
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


class ReviewQueue(SqliteFile):
    """The queue in the file ``path``. Thread-safe; methods raise InfraFailure ``review_queue``.

    ``rewards`` score a task whose label a reviewer corrects. A decision removes reviews decided more than
    ``keep_days`` before it.
    """

    def __init__(self, path: str | Path, rewards: RewardsConfig | None = None, keep_days: float = 90.0):
        super().__init__(path, TABLES, "review_queue")
        self.rewards, self.keep_s = rewards or RewardsConfig(), keep_days * 86_400

    # -- writing

    def put(
        self,
        task: UpdateTask,
        verdict: Verdict,
        question: Question,
        pictures: Mapping[str, bytes],
        views: Mapping[str, Sequence[np.ndarray]],
    ) -> bool:
        """Store an update until it is decided, durably; False if its id exists already.

        Question and verdict must be redacted. ``pictures``: PNG bytes by image id of the shown trajectory;
        ``views``: uint8 arrays by trajectory id, one for each image.
        """
        blobs: Blobs = {}
        parts: list[tuple[str, str, str, int, str]] = []
        for name, png in pictures.items():
            parts.append((task.id, "picture", name, 0, add_png(blobs, png)))
        for trajectory in task.trajectories:
            for place, view in enumerate(views[trajectory.id]):
                parts.append((task.id, "view", trajectory.id, place, add_array(blobs, view)))
        media = [m.model_copy(update={"uri": f"stored:{m.id}", "frames": None}) for m in question.media]
        stored_question = unlabelled(question).model_copy(update={"media": media})
        redacted = [without_tokens(redact_record(trajectory)) for trajectory in task.trajectories]
        shown = task.model_copy(update={"trajectories": redacted, "pseudo_label": redact(task.pseudo_label)})
        records = (record.model_dump_json() for record in (stored_question, verdict, shown, task))
        with self._transaction():
            inserted = self.store.execute(
                "INSERT OR IGNORE INTO reviews (id, state, created_at, experience, question, verdict, shown, task)"
                " VALUES (?,'waiting',?,?,?,?,?,?)",
                (task.id, task.created_at, task.experience_id, *records),
            ).rowcount
            if inserted:
                self._put(blobs)
                self.store.executemany("INSERT INTO parts VALUES (?,?,?,?,?)", parts)
        return bool(inserted)

    # -- reading

    def reviews(self, state: State | None = "waiting", limit: int = 100) -> list[Review]:
        """At most ``limit`` reviews in this state (None: any), waiting ones oldest first."""
        order = "created_at ASC, rowid ASC" if state == "waiting" else "created_at DESC, rowid DESC"
        condition = f"WHERE ? IS NULL OR state = ? ORDER BY {order} LIMIT ?"
        return [_review(row) for row in self._rows(f"{SELECT} {condition}", (state, state, limit))]

    def get(self, id: str) -> Review | None:
        rows = self._rows(f"{SELECT} WHERE id = ?", (id,))
        return _review(rows[0]) if rows else None

    def pictures(self, id: str) -> dict[str, bytes]:
        """PNG bytes by image id of the shown trajectory."""
        return {row["name"]: row["data"] for row in self._parts(id, "picture")}

    def views(self, id: str) -> dict[str, list[np.ndarray]]:
        """The uint8 views by trajectory id, as they were put."""
        review = self.get(id)
        views: dict[str, list[np.ndarray]] = {t.id: [] for t in review.task.trajectories} if review else {}
        for row in self._parts(id, "view"):
            views[row["name"]].append(array_of(row))
        return views

    def dispute(self, experience_id: str, feedback: Feedback) -> int:
        """Leave waiting reviews whose label the feedback calls wrong to a person; returns their number."""
        rows = self._rows(f"{SELECT} WHERE state = 'waiting' AND {HAS_EXPERIENCE}", (experience_id,))
        tasks = [_review(row).task for row in rows]
        about = [task for task in tasks if experience_id in speaking_for(task)]
        wrong = [task.id for task in about if contradicts(feedback, task.pseudo_label)]
        with self._transaction():
            self.store.executemany(
                "UPDATE reviews SET comment = ? WHERE id = ?", [(DISPUTED, id) for id in wrong]
            )
        return len(wrong)

    def due(self, now: float, after_s: float) -> list[str]:
        """Ids of the undisputed updates that have waited ``after_s`` seconds or longer, oldest first."""
        waiting = "state = 'waiting' AND comment = '' AND created_at <= ?"
        sql = f"SELECT id FROM reviews WHERE {waiting} ORDER BY created_at, rowid"
        return [row["id"] for row in self._rows(sql, (now - after_s,))]

    def waiting(self) -> int:
        return int(self._rows("SELECT count(*) AS n FROM reviews WHERE state = 'waiting'")[0]["n"])

    def stats(self) -> dict[str, float]:
        """Counts by state and of corrected reviews, mean seconds to a decision, bytes of blobs."""
        (row,) = self._rows(
            "SELECT total(state = 'waiting') AS waiting, total(state = 'approved') AS approved,"
            " total(state = 'rejected') AS rejected, total(answer NOTNULL) AS corrected,"
            " coalesce(avg(decided_at - created_at), 0.0) AS mean_wait_s,"
            " (SELECT total(length(data)) FROM blobs) AS picture_bytes FROM reviews"
        )
        return dict(row)

    # -- decisions

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

        ``answer`` corrects the label of an approved task, which is scored again. Raises BadInput
        ``unknown_review``, ``control_token``, and ``already_decided`` if the earlier decision differs.
        """
        now = time.time() if now is None else now
        answer = (answer or "").strip() or None
        if answer is not None and (token := CONTROL_TOKEN.search(answer)):
            raise BadInput(
                f"the answer spells the control token {token.group():.60}",
                code="control_token",
                fix="give the answer as text alone",
            )
        stored_answer = redact(answer) if answer else None
        review = self._existing(id)
        if review.state == "waiting":
            task = self.task(id) if decision == "approved" else None
            if task is not None and answer is not None and not agrees(answer, task.pseudo_label):
                task = relabel(task, review.question, answer, self.rewards)
            stored_task = task and task.model_dump_json()
            with self._transaction():
                changed = self.store.execute(
                    "UPDATE reviews SET state=?, decided_at=?, reviewer=?, comment=?, answer=?, task=?"
                    " WHERE id=? AND state='waiting'",
                    (decision, now, reviewer, redact(comment), stored_answer, stored_task, id),
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
        """The task to learn from, with the correction once approved; None if it was removed."""
        rows = self._rows("SELECT task FROM reviews WHERE id = ? AND task NOTNULL", (id,))
        return UpdateTask.model_validate_json(rows[0]["task"]) if rows else None

    def done(self, ids: Sequence[str]) -> None:
        """Remove the tasks of these approved updates, which were learnt from or given up."""
        self._write("UPDATE reviews SET task=NULL WHERE id=? AND state='approved' AND task NOTNULL", ids)

    # -- removing

    def forget(self, experience_ids: Sequence[str]) -> int:
        """Remove the reviews of these experiences with their pictures; returns their number."""
        return self._write(f"DELETE FROM reviews WHERE {HAS_EXPERIENCE}", [id for id in experience_ids if id])

    def prune(self, before: float) -> int:
        """Remove the reviews decided before this time with their pictures; returns their number."""
        return self._write("DELETE FROM reviews WHERE state != 'waiting' AND decided_at < ?", [before])

    def _write(self, sql: str, values: Sequence[Any]) -> int:
        """Change the reviews of each value; returns their number. Nothing removed stays in the files."""
        with self._transaction():
            count = sum(self.store.execute(sql, (value,)).rowcount for value in values)
            self.store.execute(DELETE_UNUSED_BLOBS)
        if count:
            self._truncate_wal()
        return count

    # -- SQLite

    def _parts(self, id: str, kind: str) -> list[sqlite3.Row]:
        stored = "SELECT name, shape, data FROM parts JOIN blobs USING (hash)"
        return self._rows(f"{stored} WHERE review = ? AND kind = ? ORDER BY name, place", (id, kind))


def without_tokens(trajectory: Trajectory) -> Trajectory:
    turns = [turn.model_copy(update={"tokens": [], "log_probs": []}) for turn in trajectory.turns]
    return trajectory.model_copy(update={"turns": turns})


def _review(row: sqlite3.Row) -> Review:
    values = dict(row)
    task = UpdateTask.model_validate_json(values.pop("shown"))
    question = Question.model_validate_json(values.pop("question"))
    verdict = Verdict.model_validate_json(values.pop("verdict"))
    return Review(question=question, verdict=verdict, task=task, **values)
