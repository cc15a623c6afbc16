"""Annotated data sets in their official layouts, each row a question with ``annotations``.

A source is ``NAME:ROOT?split=train&key=value``. Pictures and clips are named, never opened; where an annotation file does not
tell a picture's size, only its header is read.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from urllib.parse import parse_qsl

from pixelis.datasets.readers import agents, benchmarks, captions, coco_like, motion, temporal, text, video_masks
from pixelis.datasets.readers.base import DatasetReader, DatasetRoot, Rows
from pixelis.errors import BadInput

_MODULES = (coco_like, text, captions, video_masks, motion, temporal, agents, benchmarks)
READERS: dict[str, DatasetReader] = {name: reader for module in _MODULES for name, reader in module.READERS.items()}


def is_dataset(source: str) -> bool:
    """Whether a source names one of these data sets."""
    name, colon, _ = source.partition(":")
    return bool(colon) and name in READERS


def read(source: str) -> Rows:
    """The rows of a source in the order of its files: questions, and as values the rows that cannot be used.

    Raises BadInput for an unknown name or option at once, and while reading for a file that is not what it should be;
    MissingFile, telling the official layout, before the first row.
    """
    place = find(source)
    return place.reader.read(place)


def find(source: str) -> DatasetRoot:
    """The data set, folder and options that a source names; raises BadInput."""
    name, _, rest = source.partition(":")
    root, _, query = rest.partition("?")
    if name not in READERS:
        raise BadInput(f"{source}: no data set {name!r}{_near(name, READERS)}", fix=f"one of {', '.join(READERS)}")
    reader = READERS[name]
    given = dict(parse_qsl(query, keep_blank_values=True))
    for key in given:
        if key not in reader.options:
            raise BadInput(f"{source}: {name} has no option {key!r}{_near(key, reader.options)}", fix=_example(reader))
    if not root:
        raise BadInput(f"{source} names no folder", fix=_example(reader))
    if "://" in root:
        raise BadInput(f"{source}: a data set is read from a local folder", fix="copy or mount it; rows of files may be remote")
    return DatasetRoot(reader, Path(root), {**reader.options, **given})


def _near(word: str, known) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _example(reader: DatasetReader) -> str:
    options = "&".join(f"{key}={value}" for key, value in reader.options.items())
    return f"write {reader.name}:/data/{reader.name}?{options}" if options else f"write {reader.name}:/data/{reader.name}"
