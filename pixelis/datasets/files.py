"""Rows of JSON-lines, JSON and parquet files and of folders of these, streamed from this machine or any pyarrow filesystem.

A file is never held as a whole: lines are read one by one, the elements of a JSON list as they come, parquet a few megabytes of
a row group at a time.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.source_options import parse_options
from pixelis.errors import BadInput, MissingFile

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
PACKED = (".gz", ".bz2", ".zst")
"""Compressions of text files, told by the end of the name."""
OPTIONS = ("format", "media", "scorer", "cache")
"""What a source may say of its rows after the question mark."""
CHUNK = 1 << 20
"""Characters read at a time from a JSON list, and bytes of a parquet column."""
TOKEN = 16
"""Characters beyond which no literal, number's sign or escape of JSON goes on: a fault so far from the end is one."""
BATCH_BYTES = 4 << 20
"""Decoded parquet rows held at a time; a single row may be larger."""
_SCHEME = re.compile(r"[a-z][a-z0-9+.\-]*://")
_GAP = re.compile(r"\s*,?\s*")


class Row(NamedTuple):
    """One row and where it stands; ``number`` counts the lines of a text file, or the rows, from 1."""

    file: str
    number: int
    values: dict[str, Any]


@dataclass(frozen=True)
class Source:
    """``PATH?format=NAME&media=FOLDER&scorer=NAME&cache=FOLDER``: files of rows, and what these do not say themselves.

    ``media`` is the folder that relative references are about, itself relative to the folder of the files (the default).
    ``cache`` is where media that come inside the rows, or from another machine, are kept as files. Other parts of the query of a
    ``scheme://`` path belong to its filesystem.
    """

    path: str
    format: str | None = None
    media: str | None = None
    scorer: str | None = None
    cache: str | None = None

    @classmethod
    def of(cls, text: str) -> Source:
        """Read a source; BadInput names an unknown option."""
        path, _, query = text.partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        own = {key: value for key, value in pairs if key in OPTIONS and value}
        rest = [(key, value) for key, value in pairs if key not in OPTIONS]
        if rest and not _SCHEME.match(path):
            parse_options(text, OPTIONS)
        return cls(path + ("?" + urlencode(rest) if rest else ""), **own)

    def open(self) -> tuple[fs.FileSystem, str]:
        """The filesystem and the path in it; MissingFile or BadInput when there is none."""
        if not _SCHEME.match(self.path):
            return fs.LocalFileSystem(), self.path
        try:
            return fs.FileSystem.from_uri(self.path)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise BadInput(f"{self.path}: no such filesystem: {_said(error)}", fix="write s3://bucket/folder, gs://...") from None

    def files(self) -> tuple[fs.FileSystem, str, list[str]]:
        """The filesystem, the folder that references are relative to, and the files of rows in the order of their names.

        MissingFile when nothing is there, BadInput when it holds no rows of a known kind.
        """
        system, path = self.open()
        try:
            info = system.get_file_info(path)
            if info.type == fs.FileType.NotFound:
                raise MissingFile(
                    f"no file {self.path}",
                    fix="name a file or folder of JSON lines, JSON or parquet, or cards:?split=train for the picture world",
                )
            if info.type == fs.FileType.File:
                if kind(path) is None:
                    raise BadInput(f"{self.path} is no file of rows", fix=f"its name ends with one of {', '.join(SUFFIXES)}")
                return system, str(PurePosixPath(path).parent), [path]
            found = system.get_file_info(fs.FileSelector(path, recursive=True))
        except OSError as error:
            raise BadInput(f"{self.path} cannot be read: {_said(error)}") from None
        inside = [item.path for item in found if item.type == fs.FileType.File and kind(item.path)]
        files = sorted(file for file in inside if not _hidden(file[len(path) :]))
        if not files:
            raise BadInput(f"the folder {self.path} holds no {', '.join(SUFFIXES)}", fix="name the folder with the files of rows")
        return system, path, files


def _hidden(path: str) -> bool:
    """Hidden files, and what is written beside rows about where they come from (`telemetry.lineage`)."""
    parts = PurePosixPath(path.lstrip("/")).parts
    return any(part.startswith((".", "_")) for part in parts) or f".{parts[-1]}".endswith(".lineage.json")


def kind(path: str) -> str | None:
    """The suffix in ``SUFFIXES`` that says how a file is written, a compression left aside; None for other files."""
    name = path.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def read_file(system: fs.FileSystem, path: str) -> Iterator[Row | BadRow]:
    """The rows of one file, those that are no JSON object as ``BadRow``; BadInput when what follows cannot be read at all."""
    try:
        match kind(path):
            case ".parquet":
                yield from _parquet(system, path)
            case ".json":
                yield from _json(system, path)
            case _:
                yield from _lines(system, path)
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{path} cannot be read: {_said(error)}", fix="write the file again, or remove it") from None


def _lines(system: fs.FileSystem, path: str) -> Iterator[Row | BadRow]:
    with system.open_input_stream(path, compression="detect", buffer_size=CHUNK) as stream:
        for number, line in enumerate(io.BufferedReader(stream, CHUNK), 1):
            if not line.strip():
                continue
            try:
                yield _checked(path, number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
            except json.JSONDecodeError as error:
                yield BadRow(path, str(number), "all", "not_json", f"not JSON ({error.msg} at column {error.colno})")
            except UnicodeDecodeError as error:
                yield BadRow(path, str(number), "all", "not_utf8", f"not UTF-8 at byte {error.start}")
            except (RecursionError, ValueError) as error:
                yield BadRow(path, str(number), "all", "not_json", f"not JSON ({_said(error)})")


def _json(system: fs.FileSystem, path: str) -> Iterator[Row | BadRow]:
    """Elements of a list, or objects one after the other; what follows a fault cannot be read, so that it ends the file."""
    decoder, text, number, place = json.JSONDecoder(), "", 0, 0
    with system.open_input_stream(path, compression="detect", buffer_size=CHUNK) as stream:
        characters = io.TextIOWrapper(io.BufferedReader(stream, CHUNK), encoding="utf-8-sig")
        wanted, ended, in_list, closed = CHUNK, False, False, False
        try:
            while True:
                place = _between(text, place)
                if not number and not in_list and not closed and text.startswith("[", place):
                    in_list, place = True, place + 1
                    continue
                if in_list and text.startswith("]", place):
                    in_list, closed, place = False, True, place + 1
                    continue
                if closed and place < len(text):
                    raise BadInput(f"{path}, after row {number}: more follows the list", fix="write one list, or JSON lines")
                fault = None
                try:
                    value, after = decoder.raw_decode(text, place)
                except json.JSONDecodeError as error:
                    fault = error
                if not ended and (after == len(text) if fault is None else _cut_off(fault)):  # by the end of what was read
                    more = characters.read(wanted)
                    ended, text, place, wanted = not more, text[place:] + more, 0, 2 * wanted
                    continue
                if fault is not None:
                    if place == len(text) and not in_list:
                        return
                    raise BadInput(f"{path}, row {number + 1}: not JSON ({fault.msg})", fix="mend the file from there on")
                number, wanted, place = number + 1, CHUNK, after
                yield _checked(path, number, value)
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}, after row {number}: not UTF-8: {error.reason}", fix="save the file as UTF-8") from None
        except RecursionError:
            raise BadInput(f"{path}, row {number + 1}: nested too deeply") from None
        except ValueError as error:  # a whole number of thousands of digits
            raise BadInput(f"{path}, row {number + 1}: not JSON ({_said(error)})") from None


def _cut_off(fault: json.JSONDecodeError) -> bool:
    """Whether the text may be right when it goes on."""
    return fault.msg.startswith("Unterminated string") or len(fault.doc) - fault.pos < TOKEN


def _between(text: str, place: int) -> int:
    """Past white space and the comma between two elements."""
    return _GAP.match(text, place).end()  # type: ignore[union-attr]  # it matches nothing, too


def _checked(path: str, number: int, values: Any) -> Row | BadRow:
    if not isinstance(values, dict):
        return BadRow(path, str(number), "all", "not_an_object", f"a row is a JSON object, not {type(values).__name__}")
    return Row(path, number, values)


def _parquet(system: fs.FileSystem, path: str) -> Iterator[Row]:
    with system.open_input_file(path) as handle, pq.ParquetFile(handle, buffer_size=CHUNK, pre_buffer=False) as table:
        groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
        rows, size = sum(group.num_rows for group in groups), sum(group.total_byte_size for group in groups)
        batch_rows = max(1, min(1024, BATCH_BYTES // max(1, size // max(rows, 1))))
        number = 0
        for batch in table.iter_batches(batch_size=batch_rows, use_threads=False):
            for values in batch.to_pylist():
                number += 1
                yield Row(path, number, values)


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
