"""Readers of annotated data sets in their official layouts: each row becomes a question with ``annotations``.

A source is ``NAME:ROOT?split=train&key=value``. Images and clips are named, never opened; where an annotation file lacks the
size of an image, only its header is read.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import parse_qsl

from pixelis.datasets.readers import agents, benchmarks, captions, coco_like, motion, temporal, text, video_masks
from pixelis.datasets.readers.base import DatasetReader, DatasetRoot, Rows
from pixelis.errors import BadInput

_MODULES = (coco_like, text, captions, video_masks, motion, temporal, agents, benchmarks)
_CATALOG = tomllib.loads(Path(__file__).with_name("datasets.toml").read_text(encoding="utf-8"))
READERS = {name: DatasetReader(name, read=read, **_CATALOG[name]) for module in _MODULES for name, read in module.READERS.items()}


def is_dataset(source: str) -> bool:
    """Whether a source names one of these data sets."""
    name, colon, _ = source.partition(":")
    return bool(colon) and name in READERS


def read(source: str) -> Rows:
    """The rows of a source in the order of its files: questions, and the rows that cannot be used as values.

    BadInput for an unknown name or option at once, and while reading for a file of the wrong kind; MissingFile, which quotes the
    official layout, before the first row.
    """
    root = find(source)
    return root.reader.read(root)


def find(source: str) -> DatasetRoot:
    """The data set, folder and options that a source names; BadInput."""
    name, _, rest = source.partition(":")
    folder, _, query = rest.partition("?")
    if name not in READERS:
        raise BadInput(f"{source}: no data set {name!r}{_suggestion(name, READERS)}", fix=f"one of {', '.join(READERS)}")
    reader = READERS[name]
    options = dict(parse_qsl(query, keep_blank_values=True))
    for key in options:
        if key not in reader.options:
            message = f"{source}: {name} has no option {key!r}{_suggestion(key, reader.options)}"
            raise BadInput(message, fix=_example(reader))
    if not folder:
        raise BadInput(f"{source} names no folder", fix=_example(reader))
    if "://" in folder:
        raise BadInput(f"{source}: a data set is read from a local folder", fix="copy or mount it; files of rows may be remote")
    return DatasetRoot(reader, Path(folder), {**reader.options, **options})


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _example(reader: DatasetReader) -> str:
    options = "&".join(f"{key}={value}" for key, value in reader.options.items())
    return f"write {reader.name}:/data/{reader.name}" + (f"?{options}" if options else "")
