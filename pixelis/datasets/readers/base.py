"""Shared parts of the readers: required paths, and annotation files whose faulty rows are collected."""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.fields import RowError, number, text
from pixelis.datasets.files import FIELD_CHARACTERS, Part, read_part
from pixelis.datasets.formats.base import choices
from pixelis.datasets.media_root import MediaRoot
from pixelis.errors import BadInput, MissingFile
from pixelis.records import Annotations, Box, Media, Question, Region

Rows = Iterator[Question | BadRow]
Size = tuple[int | None, int | None]
"""Width and height of an image in pixels, where they are known."""


@dataclass(frozen=True)
class DatasetReader:
    """One data set and the layout of its official release, as ``datasets.toml`` describes it.

    ``read``: a function, or its name as ``module:function`` in this package.
    """

    name: str
    task: str
    read: Callable[[DatasetRoot], Rows] | str
    layout: str
    source: str
    options: Mapping[str, str] = field(default_factory=lambda: {"split": "train"})
    exhaustive: bool = False

    def rows(self, root: DatasetRoot) -> Rows:
        if not isinstance(self.read, str):
            return self.read(root)
        module, function = self.read.split(":")
        return getattr(importlib.import_module(f"pixelis.datasets.readers.{module}"), function)(root)


@dataclass(frozen=True)
class DatasetRoot:
    """A data set in a folder, with the options of its source."""

    reader: DatasetReader
    folder: Path
    options: Mapping[str, str]

    @property
    def split(self) -> str:
        return self.options.get("split", "")

    def number(self, key: str) -> float:
        try:
            return number(self.options[key], key)
        except RowError as error:
            message = f"{self.reader.name}: {key}={error.message}"
            raise BadInput(message, fix=f"write e.g. {key}=100") from None

    def flag(self, key: str) -> bool:
        if self.options[key] not in ("yes", "no"):
            raise BadInput(f"{self.reader.name}: {key}={self.options[key]} is neither yes nor no")
        return self.options[key] == "yes"

    def _below(self, name: str) -> Path:
        """A path below the folder with ``{option}`` filled in; BadInput if an option leads out of it."""
        path = self.folder / name.format_map(self.options)
        if not path.is_relative_to(self.folder) or ".." in path.relative_to(self.folder).parts:
            raise BadInput(f"{self.reader.name}: an option leads out of {self.folder}")
        return path

    def path(self, *names: str) -> Path:
        """The first of these paths that exists, options filled in; MissingFile quotes the layout."""
        paths = [self._below(name) for name in names]
        for path in paths:
            if path.exists():
                return path
        message = f"{self.reader.name}: no {' or '.join(map(str, paths))}"
        raise MissingFile(message, fix=f"the official layout is {self.reader.layout}")

    def paths(self, pattern: str, example: str) -> list[Path]:
        files = self.folder.glob(str(self._below(pattern).relative_to(self.folder)))
        return sorted(files) or [self.path(example)]

    def file(self, *names: str) -> AnnotationFile:
        return AnnotationFile(self, self.path(*names))

    def media_root(self) -> MediaRoot:
        """Where images inside rows become files."""
        return MediaRoot(fs.LocalFileSystem(), str(self.folder), self.options["cache"] or None)


class AnnotationFile:
    """One file of annotations: reads its rows, and collects the errors of those that cannot be used."""

    def __init__(self, root: DatasetRoot, path: Path):
        self.root, self.path = root, path
        self._errors: list[BadRow] = []

    # Errors

    @contextlib.contextmanager
    def collect_errors(self, name: Any) -> Iterator[None]:
        """Context for a row or a part of one: a RowError or ValueError ends it, and is collected."""
        try:
            yield
        except RowError as error:
            self._errors.append(BadRow(str(self.path), str(name), error.column, error.code, error.message))
        except (TypeError, ValueError) as error:  # values that do not fit each other, or no record
            message = " ".join(str(error).split())[:300]
            self._errors.append(BadRow(str(self.path), str(name), "all", "wrong_type", message))

    def take_errors(self) -> list[BadRow]:
        errors, self._errors = self._errors, []
        return errors

    def convert(self, name: Any, make: Callable[..., Question | None], *arguments: Any) -> Rows:
        """The errors collected in ``make(*arguments)``, then its question, if any."""
        question = None
        with self.collect_errors(name):
            if (made := make(*arguments)) is not None:
                made.model_dump_json()  # fails on half a surrogate pair, which JSON can escape
                question = made
        yield from self.take_errors()
        if question is not None:
            yield question

    # Rows

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        return read_json(self.path)

    def items(self, key: str, kind: type = list) -> Any:
        """The list, or another ``kind``, under ``key`` of the JSON object; BadInput: it is another file."""
        if not isinstance(self.data.get(key), kind):
            there = sorted(map(str, self.data))[:8]
            message = f"{self.path} has no {kind.__name__} of {key}, only {there}"
            raise BadInput(message, fix="give the official file")
        return self.data[key]

    def group(
        self, rows: Iterable[Any], column: str, list_name: str = ""
    ) -> dict[str, list[tuple[str, Any]]]:
        """The rows of a list, each with its name, by the text in a column."""
        groups: dict[str, list[tuple[str, Any]]] = {}
        for i, row in enumerate(rows):
            with self.collect_errors(name := f"{list_name}[{i}]"):
                groups.setdefault(text(row, column), []).append((name, row))
        return groups

    def each_item(self, key: str, make: Callable[[Any], Question | None]) -> Rows:
        for i, item in enumerate(self.items(key)):
            yield from self.convert(f"{key}[{i}]", make, item)

    def each_entry(self, entries: Mapping[str, Any], make: Callable[[str, Any], Question | None]) -> Rows:
        for key, value in entries.items():
            yield from self.convert(key, make, key, value)

    def each_row(
        self, make: Callable[[dict[str, Any]], Question | None], columns: list[str] | None = None
    ) -> Rows:
        """``make`` of each row of a file that `files` can stream; ``columns``: those to read of parquet."""
        for row in read_part(fs.LocalFileSystem(), Part(str(self.path)), columns):
            if isinstance(row, BadRow):
                yield row
            else:
                yield from self.convert(row.number, make, row.values)

    def table_rows(
        self, columns: Iterable[str], delimiter: str = ","
    ) -> Iterator[tuple[str, dict[str, str]]]:
        csv.field_size_limit(FIELD_CHARACTERS)
        with self.path.open(encoding="utf-8-sig", newline="", errors="replace") as file:
            reader = csv.DictReader(file, delimiter=delimiter, restval="")
            there = reader.fieldnames or []
            if missing := [name for name in columns if name not in there]:
                message = f"{self.path} has no column {missing[0]}, only {there}"
                raise BadInput(message, fix="give the official file")
            try:
                for row in reader:
                    yield f"line {reader.line_num}", row
            except csv.Error as error:
                raise BadInput(f"{self.path}, line {reader.line_num}: {error}") from None

    def question(
        self,
        key: Any,
        media: Media | list[Media],
        annotations: Annotations | None = None,
        question: str = "",
        answers: list[str] | None = None,
        scorer: str = "exact",
        **meta: Any,
    ) -> Question:
        """The question of one row; ``meta`` tells its origin and how many annotations were ``dropped``."""
        reader, split, annotations = self.root.reader, self.root.split, annotations or Annotations()
        meta = {"source": reader.name, "original_id": str(key), "dropped": len(self._errors) or None, **meta}
        if annotations.regions and not reader.exhaustive:
            meta["not_exhaustive"] = sorted({region.label for region in annotations.regions})
        return Question(
            id="-".join(filter(None, (reader.name, split, str(key)))),
            question=question,
            media=media if isinstance(media, list) else [media],
            answers=answers,
            scorer=scorer,
            task=reader.task,
            split=split or "train",
            meta={name: value for name, value in meta.items() if value not in (None, [], {}, "")},
            annotations=annotations,
        )

    def choice(
        self,
        key: Any,
        media: Media | list[Media],
        question: str,
        options: list[str],
        answer: int | None,
        column: str = "answer",
        annotations: Annotations | None = None,
        **meta: Any,
    ) -> Question:
        if answer is not None and not 0 <= answer < len(options):
            raise RowError(column, "no_label", f"the answer names none of the {len(options)} options")
        letters = None if answer is None else [chr(ord("A") + answer)]
        prompt = choices(question, options)
        return self.question(key, media, annotations, prompt, letters, "mc_letter", options=options, **meta)


def image(uri: str, size: Size = (None, None), id: str = "img0") -> Media:
    return Media(id=id, uri=uri, width=size[0], height=size[1])


def clip(
    uri: str = "", frames: list[str] | None = None, fps: float = 1.0, size: Size = (None, None)
) -> Media:
    return Media(id="vid0", kind="video", uri=uri, frames=frames, fps=fps, width=size[0], height=size[1])


def tracked(track: object, frame: int, label: str, box: Box, **fields: Any) -> Region:
    """A region in a frame of a clip; regions of one ``track`` are one object."""
    id = f"{track}.{frame}"
    return Region(id=id, label=label, box=box, media="vid0", frame=frame, track=str(track), **fields)


def frames_in(folder: Path, column: str) -> list[str]:
    frames = sorted(str(path) for path in folder.glob("*.jpg"))
    if not frames:
        raise RowError(column, "media_not_found", f"no frames in {folder}")
    return frames


def index_of(answer: str, options: list[str]) -> int:
    return options.index(answer) if answer in options else -1


def below(folder: Path, name: str, column: str) -> str:
    """The path of a file that a row names; RowError ``media_traversal`` if it is not inside ``folder``."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise RowError(column, "media_traversal", f"{name!r:.80} is not a file in {folder}")
    return str(folder / name)


def read_json(path: Path, kind: type = dict) -> Any:
    try:
        with pa.input_stream(path, compression="detect") as file:
            value = json.load(file)
    except (ValueError, RecursionError, OSError) as error:
        raise BadInput(f"{path} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise BadInput(f"{path} holds a {type(value).__name__}, expected a {kind.__name__}")
    return value


def read_json_row(path: Path) -> dict[str, Any]:
    """A JSON file that is one row of many. RowError."""
    if not path.is_file():
        raise RowError("file", "missing_file", f"no {path}")
    try:
        return read_json(path)
    except BadInput as error:
        raise RowError("file", "not_json", error.message) from None
