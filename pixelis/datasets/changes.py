"""How records are read in tasks of Ray Data, and changed on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Read = Callable[[], Iterable[dict[str, Any]]]
"""Returns the rows of a task."""


class Change(NamedTuple):
    """A change of records: a class whose instances map the texts of some records to as many others, each in a process.

    arguments: of its constructor; workers: processes at most, of which each reserves `cpus`; rows: of one call.
    """

    make: type
    arguments: tuple
    workers: int
    cpus: float
    rows: int
