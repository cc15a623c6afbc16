"""Shared parts of the dataset readers: sources, required folders, rows that may be bad, checked fields."""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.fields import RowError
from pixelis.datasets.files import read_file
from pixelis.errors import BadInput, MissingFile
from pixelis.records import Annotations, Media, Question

Rows = Iterator[Question | BadRow]
LONGEST_CELL = 1 << 28
"""Characters of a table's cell."""


@dataclass(frozen=True)
class DatasetReader:
    """One data set: how its official release lies on disk and what reads it.

    ``layout`` is the folder tree, told to who gives another one. ``options`` are the keys that a source may set, with their
    defaults. ``task`` is the kind of ground it brings, ``source`` where the layout is described. ``exhaustive``: all things of an
    annotated kind are annotated, so that they can be counted.
    """

    name: str
    task: str
    read: Callable[[DatasetRoot], Rows]
    layout: str
    source: str
    options: Mapping[str, str] = field(default_factory=lambda: {"split": "train"})
    exhaustive: bool = False


@dataclass(frozen=True)
class DatasetRoot:
    """A data set in a folder, with the options of its source filled in."""

    reader: DatasetReader
    root: Path
    options: Mapping[str, str]

    @property
    def split(self) -> str:
        """The split that was asked for, as the data set calls it."""
        return self.options.get("split", "")

    def number(self, key: str) -> float:
        """A numeric option; BadInput when it is none."""
        try:
            value = float(self.options[key])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BadInput(f"{self.reader.name}: {key}={self.options[key]} is no number", fix=f"write e.g. {key}=100")
        return value

    def flag(self, key: str) -> bool:
        """A ``yes`` or ``no`` option; BadInput when it is neither."""
        if self.options[key] not in ("yes", "no"):
            raise BadInput(f"{self.reader.name}: {key}={self.options[key]} is neither yes nor no")
        return self.options[key] == "yes"

    def path(self, *names: str) -> Path:
        """The first of these paths below the root that exists, ``{option}`` filled in; MissingFile tells the whole layout."""
        paths = [self.root / name.format_map(self.options) for name in names]
        if any(not path.is_relative_to(self.root) or ".." in path.relative_to(self.root).parts for path in paths):
            raise BadInput(f"{self.reader.name}: the option leads out of {self.root}")
        for path in paths:
            if path.exists():
                return path
        wanted = " or ".join(str(path) for path in paths)
        raise MissingFile(f"{self.reader.name}: no {wanted}", fix=f"the official layout is {self.reader.layout}")

    def question(
        self,
        original: Any,
        media: Media,
        annotations: Annotations,
        question: str = "",
        answers: list[str] | None = None,
        scorer: str = "exact",
        dropped: int = 0,
        **meta: Any,
    ) -> Question:
        """The record of one row; ``meta`` tells its origin, how many annotations were ``dropped``, labels ``not_exhaustive``."""
        told = {key: value for key, value in meta.items() if value not in (None, [], {}, "")}
        if annotations.regions and not self.reader.exhaustive:
            told["not_exhaustive"] = sorted({region.label for region in annotations.regions})
        if dropped:
            told["dropped"] = dropped
        return Question(
            id=f"{self.reader.name}-{self.split}-{original}" if self.split else f"{self.reader.name}-{original}",
            question=question,
            media=[media],
            answers=answers,
            scorer=scorer,
            task=self.reader.task,
            split=self.split or "train",
            meta={"source": self.reader.name, "original_id": str(original), **told},
            annotations=annotations,
        )


class Checker:
    """Reads on past the faulty rows of one file and keeps what was wrong with them."""

    def __init__(self, file: Path | str):
        self.file = str(file)
        self._bad: list[BadRow] = []
        self._seen: set[Any] = set()

    @contextlib.contextmanager
    def row(self, name: Any) -> Iterator[None]:
        """Reading of one row: a Fault in it ends the row, and is kept."""
        try:
            yield
        except RowError as problem:
            self._bad.append(BadRow(self.file, str(name), problem.column, problem.code, problem.message))

    def unique(self, value: Any, column: str) -> Any:
        """``value``, which no earlier row has."""
        if value in self._seen:
            raise RowError(column, "duplicate_id", f"{value!r} is there twice")
        self._seen.add(value)
        return value

    @property
    def pending(self) -> int:
        """Faults since the last ``take``."""
        return len(self._bad)

    def take(self) -> list[BadRow]:
        """The faults since the last call."""
        bad, self._bad = self._bad, []
        return bad

    def items(self, data: Mapping[str, Any], key: str) -> list[Any]:
        """The list under ``key`` of the whole file; BadInput when there is none, for then it is another file."""
        if not isinstance(data.get(key), list):
            raise BadInput(f"{self.file} has no list of {key}, only {sorted(map(str, data))[:8]}", fix="give the official file")
        return data[key]

    def one(self, name: Any, make: Callable[..., Question], *arguments: Any) -> Rows:
        """What one row gives: the faults in it, and ``make(*arguments)`` unless that is one."""
        question = None
        with self.row(name):
            question = make(*arguments)
        yield from self.take()
        if question is not None:
            yield question


# -- files ----------------------------------------------------------------------------------------------------------


def read_json(path: Path, kind: type = dict) -> Any:
    """A whole JSON file, gzipped or not, that holds a ``kind``; BadInput naming the place where it breaks."""
    try:
        with pa.input_stream(path, compression="detect") as file:
            value = json.load(file)
    except (ValueError, RecursionError, OSError) as error:
        raise BadInput(f"{path} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise BadInput(f"{path} holds a {type(value).__name__}, expected a {kind.__name__}")
    return value


def each_row(path: Path, make: Callable[[dict[str, Any], Checker], Question]) -> Rows:
    """``make`` of each row of a JSON-lines file or of a JSON list, which is read as it comes."""
    rows = Checker(path)
    for row in read_file(fs.LocalFileSystem(), str(path)):
        if isinstance(row, BadRow):
            yield row
        else:
            yield from rows.one(row.number, make, row.values, rows)


def table(path: Path, columns: Iterable[str], delimiter: str = ",") -> Iterator[tuple[int, dict[str, str]]]:
    """Lines of a table with a header, with their numbers, read as they come; BadInput when a column is missing."""
    csv.field_size_limit(LONGEST_CELL)  # the default refuses tables that carry pictures
    with path.open(encoding="utf-8-sig", newline="", errors="replace") as file:
        reader = csv.DictReader(file, delimiter=delimiter, restval="")
        missing = [name for name in columns if name not in (reader.fieldnames or [])]
        if missing:
            raise BadInput(f"{path} has no column {missing[0]}, only {reader.fieldnames}", fix="give the official file")
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise BadInput(f"{path}, line {reader.line_num}: {error}") from None
            yield reader.line_num, row


def small_json(path: Path, kind: type = dict) -> Any:
    """A JSON file that is one row of many: what is wrong with it, or that it is missing, is a Fault."""
    if not path.is_file():
        raise RowError("file", "missing_file", f"no {path}")
    try:
        return read_json(path, kind)
    except BadInput as error:
        raise RowError("file", "not_json", error.message) from None


def below(folder: Path, name: str, column: str) -> str:
    """The path of a file that a row names, which must lie in ``folder``; a Fault ``media_traversal`` otherwise."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise RowError(column, "media_traversal", f"{name!r:.80} is no file in {folder}")
    return str(folder / name)
