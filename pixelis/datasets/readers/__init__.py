"""Readers of annotated data sets in their official layouts, ``NAME:ROOT?split=train&key=value``.

Images and clips are named, never opened; at most the header of an image is read.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.question_changes import OPTIONS, question_changes
from pixelis.datasets.readers.base import DatasetReader, DatasetRoot, Rows
from pixelis.datasets.source_options import parse_options, suggest
from pixelis.errors import BadInput

_CATALOG = tomllib.loads(Path(__file__).with_name("datasets.toml").read_text(encoding="utf-8"))
READERS = {name: DatasetReader(name, **entry) for name, entry in _CATALOG.items()}


def is_dataset(source: str) -> bool:
    name, colon, _ = source.partition(":")
    return bool(colon) and name in READERS


def read(source: str) -> Rows:
    root = find(source)
    change = question_changes(source, root.options)
    return (row if isinstance(row, BadRow) else change(row) for row in root.reader.rows(root))


def find(source: str) -> DatasetRoot:
    name, _, rest = source.partition(":")
    if name not in READERS:
        raise BadInput(
            f"{source}: no data set {name!r}{suggest(name, READERS)}", fix=f"one of {', '.join(READERS)}"
        )
    reader = READERS[name]
    folder, options = parse_options(rest, (*reader.options, *OPTIONS))
    if not folder:
        raise BadInput(f"{source} names no folder", fix=f"write {name}:/data/{name}")
    if "://" in folder:
        raise BadInput(
            f"{source}: a data set is read from a local folder",
            fix="copy or mount it; files of rows may be remote",
        )
    return DatasetRoot(reader, Path(folder), {**reader.options, **options})
