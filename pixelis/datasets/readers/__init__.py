"""Annotated data sets in their official layouts, each row a question with ``annotations``.

A source is ``NAME:ROOT?split=train&key=value``. Pictures and clips are named, never opened; where an annotation file does not
tell a picture's size, only its header is read.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from urllib.parse import parse_qsl

from pixelis.datasets.readers import agents, benchmarks, captions, coco_like, motion, temporal, text, video_masks
from pixelis.datasets.readers.base import Family, Place, Rows
from pixelis.errors import BadInput

_MODULES = (coco_like, text, captions, video_masks, motion, temporal, agents, benchmarks)
FAMILIES: dict[str, Family] = {name: family for module in _MODULES for name, family in module.FAMILIES.items()}


def is_family(source: str) -> bool:
    """Whether a source names one of these data sets."""
    name, colon, _ = source.partition(":")
    return bool(colon) and name in FAMILIES


def read(source: str) -> Rows:
    """The rows of a source in the order of its files: questions, and as values the rows that cannot be used.

    Raises BadInput for an unknown name or option at once, and while reading for a file that is not what it should be;
    MissingFile, telling the official layout, before the first row.
    """
    place = find(source)
    return place.family.read(place)


def find(source: str) -> Place:
    """The data set, folder and options that a source names; raises BadInput."""
    name, _, rest = source.partition(":")
    root, _, query = rest.partition("?")
    if name not in FAMILIES:
        raise BadInput(f"{source}: no data set {name!r}{_near(name, FAMILIES)}", fix=f"one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    given = dict(parse_qsl(query, keep_blank_values=True))
    for key in given:
        if key not in family.options:
            raise BadInput(f"{source}: {name} has no option {key!r}{_near(key, family.options)}", fix=_example(family))
    if not root:
        raise BadInput(f"{source} names no folder", fix=_example(family))
    if "://" in root:
        raise BadInput(f"{source}: a data set is read from a local folder", fix="copy or mount it; rows of files may be remote")
    return Place(family, Path(root), {**family.options, **given})


def _near(word: str, known) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _example(family: Family) -> str:
    options = "&".join(f"{key}={value}" for key, value in family.options.items())
    return f"write {family.name}:/data/{family.name}?{options}" if options else f"write {family.name}:/data/{family.name}"
