"""Streams rows of JSON-lines, JSON, CSV, TSV, parquet, Arrow and tar files, or folders of these."""

from __future__ import annotations

import csv
import io
import itertools
import json
import mimetypes
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple, cast
from urllib.parse import parse_qsl, urlencode

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.source_options import parse_options
from pixelis.errors import BadInput, MissingFile
from pixelis.hub import fetch_dataset

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".tar")
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
COLUMNS = ("question", "answer", "image")
CHUNK = 1 << 20
"""Characters read at a time from a JSON list, and bytes of a parquet column."""
TOKEN = 16
"""Longest JSON literal or escape: an error farther from the end is not due to truncation."""
PART_BYTES = 32 << 20
"""Size of the part of a file that one task reads."""
BATCH_BYTES = 4 << 20
"""Size of the decoded parquet rows in memory; a single row may be larger."""
FIELD_CHARACTERS = 1 << 28
"""Longest cell of a CSV file; it may be a picture."""
_SCHEME = re.compile(r"[a-z][a-z0-9+.\-]*://")
_GAP = re.compile(r"[\s,\[\]]*")


class Row(NamedTuple):
    """One row; ``number`` counts the lines or rows of its file from 1."""

    file: str
    number: int
    values: dict[str, Any]


class Part(NamedTuple):
    """Consecutive rows: bytes ``start`` to ``stop`` of JSON lines, row groups of parquet, or all (None)."""

    path: str
    start: int = 0
    stop: int | None = None
    rows_before: int = 0


@dataclass(frozen=True)
class Source:
    """``PATH?format=NAME&media=FOLDER&...``: files of rows with options, see docs/data.md.

    ``hf:owner/name?split=NAME``: the files of a data set on the Hugging Face Hub whose path names the split.

    Other options of a ``scheme://`` path belong to its filesystem.
    """

    path: str
    format: str | None = None
    media: str | None = None
    scorer: str | None = None
    cache: str | None = None
    prompt: str | None = None
    shuffle_options: str | None = None
    split: str | None = None
    direct: str | None = None
    typos: str | None = None
    question: str | None = None
    answer: str | None = None
    image: str | None = None

    @property
    def columns(self) -> dict[str, str]:
        return {key: column for key in COLUMNS if (column := getattr(self, key)) is not None}

    @classmethod
    def of(cls, text: str) -> Source:
        path, _, query = text.partition("?")
        pairs = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
        own = {key: value for key, value in pairs if key in OPTIONS and value}
        others = [(key, value) for key, value in pairs if key not in OPTIONS]
        if others and not _SCHEME.match(path):
            parse_options(text, OPTIONS)
        return cls(path + ("?" + urlencode(others) if others else ""), **own)

    def open(self) -> tuple[fs.FileSystem, str]:
        if self.path.startswith("hf:"):
            if self.split is None:
                fix = f"write {self.path}?split=train"
                raise BadInput(f"{self.path}: which split is not named", fix=fix)
            return fs.LocalFileSystem(), str(fetch_dataset(self.path.removeprefix("hf:"), self.split))
        if not _SCHEME.match(self.path):
            return fs.LocalFileSystem(), self.path
        try:
            return fs.FileSystem.from_uri(self.path)
        except (pa.ArrowException, OSError, ValueError) as error:
            message = f"{self.path}: no such filesystem: {_one_line(error)}"
            raise BadInput(message, fix="write s3://bucket/folder, gs://...") from None

    def files(self) -> tuple[fs.FileSystem, str, list[str]]:
        """The filesystem, the folder of relative references, the files in order. MissingFile, BadInput."""
        system, path = self.open()
        try:
            info = system.get_file_info(path)
            is_folder = info.type == fs.FileType.Directory
            entries = system.get_file_info(fs.FileSelector(path, recursive=True)) if is_folder else []
        except OSError as error:
            raise BadInput(f"{self.path} cannot be read: {_one_line(error)}") from None
        if info.type == fs.FileType.NotFound:
            fix = "name a file or folder of rows, or cards:?split=train for the picture world"
            raise MissingFile(f"{self.path} does not exist", fix=fix)
        suffixes = ", ".join(SUFFIXES)
        if not is_folder:
            if kind(path) is None:
                raise BadInput(f"{self.path} is no file of rows", fix=f"its name must end with {suffixes}")
            return system, str(PurePosixPath(path).parent), [path]
        names = {entry.base_name for entry in entries}
        if "dataset_dict.json" in names:
            fix = f"name the folder of one, such as {self.path}/train"
            raise BadInput(f"{self.path} contains several splits", fix=fix)
        files = sorted(entry.path for entry in entries if entry.is_file and kind(entry.path))
        files = [file for file in files if not _is_hidden(file[len(path) :])]
        if self.split is not None:
            token = re.compile(rf"(^|[/_.-]){re.escape(self.split)}([/_.-]|$)")
            files = [file for file in files if token.search(file[len(path) :])]
        if "state.json" in names:  # a folder that the library `datasets` saved
            files = [file for file in files if kind(file) == ".arrow"]
        if not files:
            raise BadInput(
                f"the folder {self.path} contains no {suffixes}", fix="name the folder of the rows"
            )
        return system, path, files


OPTIONS = tuple(field.name for field in fields(Source) if field.name != "path")


def _is_hidden(path: str) -> bool:
    """Whether a file below a folder of rows is hidden, or a lineage record (`telemetry.lineage`)."""
    parts = PurePosixPath(path).parts
    return any(part.startswith((".", "_")) for part in parts) or f".{parts[-1]}".endswith(".lineage.json")


def kind(path: str) -> str | None:
    """The suffix in ``SUFFIXES`` of a file, without that of a compression; None for other files."""
    name = path.lower()
    for suffix in COMPRESSIONS:
        name = name.removesuffix(suffix)
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _compression(path: str) -> str | None:
    return COMPRESSIONS.get(PurePosixPath(path).suffix.lower())


def read_file(system: fs.FileSystem, path: str) -> Iterator[Row | BadRow]:
    return read_part(system, Part(path))


def read_part(system: fs.FileSystem, part: Part, columns: list[str] | None = None) -> Iterator[Row | BadRow]:
    """The rows of a part; those that are no JSON object become ``BadRow``. BadInput for a broken file."""
    with _readable(part.path):
        match kind(part.path):
            case ".parquet":
                yield from _parquet(system, part, columns)
            case ".json":
                yield from _json(system, part.path)
            case ".csv" | ".tsv":
                yield from _cells(system, part.path)
            case ".arrow":
                yield from _arrow(system, part.path)
            case ".tar":
                yield from _samples(system, part.path)
            case _:
                yield from _lines(system, part)


def split_file(system: fs.FileSystem, path: str, size: int = PART_BYTES) -> list[Part]:
    """Parts of at least ``size`` bytes, in order; a compressed file or a JSON list is one part. BadInput."""
    with _readable(path):
        if path.lower().endswith(".parquet"):
            return _split_parquet(system, path, size)
        if path.lower().endswith((".jsonl", ".ndjson")) and system.get_file_info(path).size > size:
            return _split_lines(system, path, size)
        return [Part(path)]


def _split_parquet(system: fs.FileSystem, path: str, size: int) -> list[Part]:
    with system.open_input_file(path) as handle, pq.ParquetFile(handle) as table:
        groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
    parts, start, rows, rows_before, nbytes = [], 0, 0, 0, 0
    for i, group in enumerate(groups, 1):
        rows, nbytes = rows + group.num_rows, nbytes + group.total_byte_size
        if nbytes >= size or i == len(groups):
            parts.append(Part(path, start, i, rows_before))
            start, rows_before, nbytes = i, rows, 0
    return parts


def _split_lines(system: fs.FileSystem, path: str, size: int) -> list[Part]:
    parts, start, position, lines, rows_before = [], 0, 0, 0, 0
    with system.open_input_stream(path, compression=None, buffer_size=0) as stream:
        while chunk := stream.read(CHUNK):
            if position + len(chunk) - start >= size and (
                end := chunk.find(b"\n", max(0, start + size - position)) + 1
            ):
                rows = lines + chunk.count(b"\n", 0, end)
                parts.append(Part(path, start, position + end, rows_before))
                start, rows_before = position + end, rows
            lines, position = lines + chunk.count(b"\n"), position + len(chunk)
    return [*parts, Part(path, start, position, rows_before)] if position > start else parts


@contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    # Arrow does not check the text of parquet files: UnicodeDecodeError
    except (pa.ArrowException, OSError, csv.Error, tarfile.TarError, UnicodeDecodeError) as error:
        message = f"{path} cannot be read: {_one_line(error)}"
        raise BadInput(message, fix="write the file again, or remove it") from None


def _lines(system: fs.FileSystem, part: Part) -> Iterator[Row | BadRow]:
    path, position = part.path, part.start
    if part.stop is None:
        file = system.open_input_stream(path, _compression(path), CHUNK)
    else:
        file = system.open_input_file(path)
        file.seek(part.start)
    with file:
        for number, line in enumerate(io.BufferedReader(file, CHUNK), part.rows_before + 1):
            position += len(line)
            try:
                if line.strip():
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    yield _as_row(path, number, json.loads(text))
            except (RecursionError, ValueError) as error:
                code = "not_utf8" if isinstance(error, UnicodeDecodeError) else "not_json"
                yield BadRow(path, str(number), "all", code, f"not JSON: {_one_line(error)}")
            if part.stop is not None and position >= part.stop:
                return


def _json(system: fs.FileSystem, path: str) -> Iterator[Row | BadRow]:
    """Elements of a list, or consecutive objects; an error ends the file: what follows cannot be parsed."""
    decoder, text, number, position = json.JSONDecoder(), "", 0, 0
    size, at_end, open_lists = CHUNK, False, 0
    with system.open_input_stream(path, compression=_compression(path), buffer_size=CHUNK) as stream:
        characters = io.TextIOWrapper(io.BufferedReader(stream, CHUNK), encoding="utf-8-sig")
        try:
            while True:
                gap = cast("re.Match[str]", _GAP.match(text, position))
                open_lists += gap[0].count("[") - gap[0].count("]")
                position = gap.end()
                try:
                    value, position = decoder.raw_decode(text, position)
                except json.JSONDecodeError as error:
                    unterminated = error.msg.startswith("Unterminated string")
                    if not at_end and (unterminated or len(error.doc) - error.pos < TOKEN):
                        chunk = characters.read(size)
                        at_end, text, position, size = not chunk, text[position:] + chunk, 0, 2 * size
                        continue
                    if position == len(text) and not open_lists:
                        return
                    raise ValueError(error.msg) from None
                number, size = number + 1, CHUNK
                yield _as_row(path, number, value)
        except (ValueError, RecursionError) as error:
            message = f"{path}, row {number + 1}: not JSON ({_one_line(error)})"
            raise BadInput(message, fix="correct the file from there on") from None


def _as_row(path: str, number: int, values: Any) -> Row | BadRow:
    if isinstance(values, dict):
        return Row(path, number, values)
    message = f"a row is a JSON object, not {type(values).__name__}"
    return BadRow(path, str(number), "all", "not_an_object", message)


def _parquet(system: fs.FileSystem, part: Part, columns: list[str] | None) -> Iterator[Row]:
    with (
        system.open_input_file(part.path) as handle,
        pq.ParquetFile(handle, buffer_size=CHUNK, pre_buffer=False) as table,
    ):
        indices = list(range(part.start, table.num_row_groups if part.stop is None else part.stop))
        groups = [table.metadata.row_group(i) for i in indices]
        rows, size = sum(group.num_rows for group in groups), sum(group.total_byte_size for group in groups)
        batch_rows = max(1, min(1024, BATCH_BYTES // max(1, size // max(rows, 1))))
        number = part.rows_before
        for batch in table.iter_batches(batch_rows, indices, columns, use_threads=False):
            for values in batch.to_pylist():
                number += 1
                yield Row(part.path, number, values)


def _cells(system: fs.FileSystem, path: str) -> Iterator[Row | BadRow]:
    """The lines below the header, whose separator is a comma, a tab or a semicolon; empty cells are None."""
    csv.field_size_limit(FIELD_CHARACTERS)
    with system.open_input_stream(path, compression=_compression(path), buffer_size=CHUNK) as stream:
        lines = io.TextIOWrapper(io.BufferedReader(stream, CHUNK), encoding="utf-8-sig", newline="")
        header = lines.readline()
        delimiter = max(",\t;", key=header.count)
        table = csv.reader(itertools.chain([header], lines), delimiter=delimiter, strict=True)
        columns = next(table, [])
        for number, cells in enumerate(table, 1):
            if len(cells) > len(columns):
                message = f"{len(cells)} cells, but {len(columns)} columns: quote text with a {delimiter!r}"
                yield BadRow(path, str(number), "all", "too_many_cells", message)
            elif cells:
                padded = itertools.zip_longest(columns, cells)
                yield Row(path, number, {name: cell or None for name, cell in padded})


def _arrow(system: fs.FileSystem, path: str) -> Iterator[Row]:
    with system.open_input_file(path) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        number = 0
        for batch in batches:  # a few rows at a time: their pictures may be large
            step = max(1, min(1024, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
            for start in range(0, batch.num_rows, step):
                for values in batch.slice(start, step).to_pylist():
                    number += 1
                    yield Row(path, number, values)


def _samples(system: fs.FileSystem, path: str) -> Iterator[Row | BadRow]:
    """Samples of a webdataset: consecutive files whose names are equal up to the first dot are one row."""

    def sample(member: tarfile.TarInfo) -> str:
        path = PurePosixPath(member.name)
        return str(path.parent / path.name.partition(".")[0])

    with (
        system.open_input_stream(path, compression=_compression(path), buffer_size=CHUNK) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        files = (x for x in archive if x.isfile() and not PurePosixPath(x.name).name.startswith("."))
        for number, (name, members) in enumerate(itertools.groupby(files, sample), 1):
            values, media = dict[str, Any](), {"image": list[bytes](), "video": list[bytes]()}
            try:
                for member in members:
                    content = cast("IO[bytes]", archive.extractfile(member)).read()
                    media_kind = (mimetypes.guess_type(member.name)[0] or "").partition("/")[0]
                    if media_kind in media:
                        media[media_kind].append(content)
                    elif member.name.lower().endswith("json"):
                        values |= json.loads(content)
                    else:
                        values[PurePosixPath(member.name).suffix[1:].lower()] = content.decode()
            except (ValueError, TypeError) as error:
                column = PurePosixPath(member.name).name
                yield BadRow(path, str(number), column, "not_json", f"cannot be read: {error}", name)
                continue
            for column, items in media.items():
                values |= {column: items, f"{column}s": None} if items else {}
            yield Row(path, number, {"id": name, **values})


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
