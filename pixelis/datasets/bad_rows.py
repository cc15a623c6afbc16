"""A row that cannot be used, as a value, so that a reader goes on with the next one."""

from __future__ import annotations

from typing import NamedTuple

from pixelis.errors import DataFailure, PixelisError
from pixelis.records import Question

BAD_ROW = "bad_row"
"""Kind of the events of rows that a run skips."""


class BadRow(NamedTuple):
    """One unusable row: ``row`` is its line, number or id, ``column`` the field, ``code`` the fault."""

    file: str
    row: str
    column: str
    code: str
    message: str
    id: str = ""

    @classmethod
    def of(cls, question: Question, source: str, column: str, code: str, message: str) -> BadRow:
        file, row = question.origin or (source, question.id)
        return cls(file, row, column, code, message, question.id)

    @classmethod
    def of_error(cls, question: Question, source: str, error: PixelisError) -> BadRow:
        return cls.of(question, source, "all", error.code, error.message.removeprefix(f"{question.place}: "))

    def __str__(self) -> str:
        own = f" ({self.id})" if self.id not in ("", self.row) else ""
        column = f", column {self.column}" if self.column != "all" else ""
        return f"{self.file}, row {self.row}{own}{column}: {self.message}"

    def error(self) -> DataFailure:
        return DataFailure(str(self), code=self.code)


class UniqueIds:
    def __init__(self) -> None:
        self.seen = set[int]()

    def check(self, id: str, file: str, row: str) -> BadRow | None:
        if (key := hash(id)) in self.seen:
            return BadRow(file, row, "id", "duplicate_id", f"an earlier row has the id {id!r}")
        self.seen.add(key)
        return None
