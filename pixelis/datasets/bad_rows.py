"""A row that cannot be used, as a value: where it is and why, so that a reader goes on with the next one."""

from __future__ import annotations

from typing import NamedTuple

from pixelis.errors import DataFailure


class BadRow(NamedTuple):
    """One unusable row of ``file``: ``row`` is its line, number or id, ``column`` the field, ``code`` the kind of fault."""

    file: str
    row: str
    column: str
    code: str
    message: str

    def error(self) -> DataFailure:
        """The failure to raise where bad rows are not tolerated."""
        return DataFailure(f"{self.file}, row {self.row}, column {self.column}: {self.message}", code=self.code)
