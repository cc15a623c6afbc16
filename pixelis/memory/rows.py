"""Reads what a shard stores, leaving out damaged rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pixelis.errors import InfraFailure
from pixelis.memory.database import Database
from pixelis.memory.portable import Entry
from pixelis.memory.schema import intact
from pixelis.records import Experience, Feedback

COLUMNS = "id, status, priority, retrievals, successes, feedback, record"
TEXTS = "id, json_extract(record, '$.question.question'), json_extract(record, '$.verdict.answer')"
WORD = re.compile(r"\w+")
CHUNK = 500
SEQS = "seq IN (SELECT value FROM json_each(?))"
EXPERIENCES = f"experiences WHERE {SEQS} AND {intact('experiences')}"
VECTORS = f"vectors WHERE {SEQS} AND {intact('vectors')}"
PICTURES = (
    f"experience_pictures JOIN pictures USING (hash) WHERE {SEQS} AND "
    f"{intact('experience_pictures')} AND {intact('pictures')}"
)
"""Intact rows of the experiences whose numbers are in a JSON list."""

Row = tuple[str, str, float, int, int, str, str]
"""``COLUMNS`` of an experience, cheap to send."""
Place = tuple[float, str]
"""Time and id: the sort key of listings, newest first, then by id."""


def experience(row: Row) -> Experience:
    _, status, priority, retrievals, successes, feedback, record = row
    current = {"status": status, "priority": priority, "retrievals": retrievals, "successes": successes}
    stored = Experience.model_validate_json(record)
    return stored.model_copy(
        update={**current, "feedback": [Feedback.model_validate(entry) for entry in json.loads(feedback)]}
    )


class Rows:
    def __init__(self, database: Database):
        self.database = database

    def experiences(self, seqs: Sequence[int]) -> Iterator[tuple[int, Row]]:
        for start in range(0, len(seqs), CHUNK):
            rows = self._read(f"SELECT seq, {COLUMNS} FROM {EXPERIENCES}", seqs[start : start + CHUNK])
            yield from ((seq, tuple(row)) for seq, *row in rows)

    def pictures(self, seqs: Sequence[int]) -> dict[int, dict[str, bytes]]:
        result: dict[int, dict[str, bytes]] = {}
        for seq, name, png in self._read(f"SELECT seq, name, png FROM {PICTURES}", seqs):
            result.setdefault(seq, {})[name] = png
        return result

    def entries(self, seqs: Sequence[int]) -> Iterator[list[Entry]]:
        for start in range(0, len(seqs), CHUNK):
            chunk = seqs[start : start + CHUNK]
            vectors = dict(self._read(f"SELECT seq, vector FROM {VECTORS}", chunk))
            pictures = self.pictures(chunk)
            yield [
                Entry(
                    experience(row),
                    np.frombuffer(vectors[seq], "<f4") if seq in vectors else None,
                    pictures.get(seq, {}),
                )
                for seq, row in sorted(self.experiences(chunk))
            ]

    def page(self, limit: int, after: Place | None, user: str | None) -> list[tuple[float, Row]]:
        at, id = after or (float("inf"), "")
        condition, values = _is_of(user)
        query = (
            f"SELECT created_at, {COLUMNS} FROM experiences WHERE (created_at < ? OR created_at = ? AND id > ?) "
            f"AND {condition} AND {intact('experiences')} ORDER BY created_at DESC, id LIMIT ?"
        )
        with self.database.read() as db:
            return [(row[0], row[1:]) for row in db.execute(query, [at, at, id, *values, limit]).fetchall()]

    def matching(self, user: str | None, words: Sequence[str]) -> set[str]:
        """Ids of the experiences of ``user`` with all ``words`` (case-folded beginnings of words)."""
        condition, values = _is_of(user)
        query = f"SELECT {TEXTS} FROM experiences WHERE {condition} AND {intact('experiences')}"
        with self.database.read() as db:
            texts = {
                id: WORD.findall(f"{question} {answer or ''}".casefold())
                for id, question, answer in db.execute(query, values)
            }
        return {
            id
            for id, own in texts.items()
            if all(any(other.startswith(word) for other in own) for word in words)
        }

    def _read(self, query: str, seqs: Sequence[int]) -> list[Any]:
        """The intact rows of a query about these numbers, read one by one if reading them together fails."""
        try:
            with self.database.read() as db:
                return db.execute(query, (json.dumps(list(seqs)),)).fetchall()
        except InfraFailure:
            if len(seqs) == 1:
                return []
            return [row for seq in seqs for row in self._read(query, [seq])]


def _is_of(user: str | None) -> tuple[str, list[str]]:
    """The SQL condition, with its values, for experiences of ``user``."""
    if user is None:
        return "TRUE", []
    if user.endswith("."):
        return "user >= ? AND user < ?", [user, user[:-1] + "/"]  # the character after the dot
    return "user = ?", [user]
