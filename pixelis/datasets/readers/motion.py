"""Tracked people: MOT17 and MOT20, whole sequences or windows of them.

https://motchallenge.net/instructions: ``SEQUENCE/seqinfo.ini`` tells size, length and rate; a line of ``gt/gt.txt`` is frame
(from 1), track, left, top, width, height (pixels from 1), whether it counts, class, visibility. MOT17 has every sequence three
times, once for each public detector, with the same truth.
"""

from __future__ import annotations

import configparser
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pixelis.datasets.annotation_geometry import box_xywh, sides
from pixelis.datasets.fields import RowError, number, whole
from pixelis.datasets.readers.base import Checker, DatasetReader, DatasetRoot, Rows, below
from pixelis.errors import BadInput
from pixelis.records import Annotations, Box, Media, Question, Region

SHORTEST = 100
"""Least frames of a window."""
CLASSES = (
    *("pedestrian", "person on vehicle", "car", "bicycle", "motorbike", "non motorized vehicle", "static person"),
    *("distractor", "occluder", "occluder on the ground", "occluder full", "reflection", "crowd"),
)
"""Names of the classes 1, 2, ..."""


class _Sequence(NamedTuple):
    name: str
    frames: list[str]
    fps: float
    width: int
    height: int


class _Seen(NamedTuple):
    frame: int
    track: int
    label: str
    box: Box
    visibility: float


def _sequences(place: DatasetRoot) -> Rows:
    window, stride = int(place.number("window")), int(place.number("stride"))
    if stride < 1 or (window != 0 and window < SHORTEST):
        raise BadInput(f"window={window}&stride={stride}: a window has at least {SHORTEST} frames, or 0 for all; a stride 1")
    detector, ignored = place.options.get("detector", ""), place.flag("ignored")
    for folder in sorted(path for path in place.path("{split}").iterdir() if path.is_dir()):
        if detector and folder.name.count("-") > 1 and not folder.name.endswith(f"-{detector}"):
            continue
        info, truth = Checker(folder / "seqinfo.ini"), Checker(folder / "gt" / "gt.txt")
        sequence, seen = None, defaultdict(list)
        with info.row(folder.name):
            found = _info(folder)
            for item in _truth(folder / "gt" / "gt.txt", found, truth, ignored):
                seen[item.frame].append(item)
            sequence = found
        yield from info.take()
        bad = truth.take()
        yield from bad
        if sequence is not None:
            for first, last in _windows(len(sequence.frames), window, stride):
                inside = [item for frame in range(first, last) for item in seen.get(frame, ())]
                yield _question(place, sequence, inside, first, last, len(bad))


def _windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int]]:
    """First frame and end of each window; the last one ends with the sequence, which may be shorter than a window."""
    if not window or length <= window:
        yield 0, length
        return
    for first in range(0, length - window + 1, stride):
        yield first, first + window
    if (length - window) % stride:
        yield length - window, length


def _info(folder: Path) -> _Sequence:
    config = configparser.ConfigParser(interpolation=None)
    try:
        found = config.read(folder / "seqinfo.ini", encoding="utf-8")
        values = config["Sequence"] if found else {}
    except (configparser.Error, KeyError, UnicodeDecodeError) as error:
        raise RowError("Sequence", "not_ini", " ".join(str(error).split())) from None
    if not found:
        raise RowError("file", "missing_file", f"no {folder / 'seqinfo.ini'}")
    if missing := [key for key in ("imdir", "framerate", "seqlength", "imwidth", "imheight", "imext") if key not in values]:
        raise RowError(missing[0], "missing_column", "is missing")
    width, height = sides(whole(values["imwidth"], "imWidth"), whole(values["imheight"], "imHeight"))
    pictures, length = values["imdir"], whole(values["seqlength"], "seqLength", 1)
    frames = [below(folder, f"{pictures}/{n:06d}{values['imext']}", "imDir") for n in range(1, length + 1)]
    fps = number(values["framerate"], "frameRate")
    if fps <= 0:
        raise RowError("frameRate", "not_a_number", f"{fps:g} frames a second")
    return _Sequence(folder.name, frames, fps, width, height)


def _truth(path: Path, sequence: _Sequence, rows: Checker, ignored: bool) -> Iterator[_Seen]:
    if not path.is_file():
        raise RowError("gt", "missing_file", f"no {path}: the truth of test sequences is kept back")
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line_number, line in enumerate(lines, 1):
            item = None
            with rows.row(f"line {line_number}"):
                item = _seen(line.strip().split(","), sequence, rows, ignored)
            if item is not None:
                yield item


def _seen(fields: list[str], sequence: _Sequence, rows: Checker, ignored: bool) -> _Seen | None:
    if len(fields) < 9:
        raise RowError("all", "missing_column", f"{len(fields)} fields, expected 9")
    frame, track, kind = whole(fields[0], "frame", 1), whole(fields[1], "id"), whole(fields[7], "class", 1)
    if frame > len(sequence.frames):
        raise RowError("frame", "outside", f"frame {frame} of {len(sequence.frames)}")
    if kind > len(CLASSES):
        raise RowError("class", "unknown_id", f"{kind} is no class")
    rows.unique((frame, track), "frame, id")
    if not number(fields[6], "conf") and not ignored:
        return None
    x, y, width, height = (number(value, "bbox") for value in fields[2:6])
    place = box_xywh([x - 1, y - 1, width, height], sequence.width, sequence.height)
    return _Seen(frame - 1, track, CLASSES[kind - 1], place, number(fields[8], "visibility"))


def _question(place: DatasetRoot, sequence: _Sequence, seen: list[_Seen], first: int, last: int, dropped: int) -> Question:
    regions = [
        Region(
            id=f"{item.track}.{item.frame - first}",
            label=item.label,
            box=item.box,
            media="vid0",
            frame=item.frame - first,
            track=str(item.track),
            attributes={"visibility": item.visibility},
        )
        for item in seen
    ]
    frames = sequence.frames[first:last]
    media = Media(id="vid0", kind="video", frames=frames, fps=sequence.fps, width=sequence.width, height=sequence.height)
    whole_ = last - first == len(sequence.frames)
    key = sequence.name if whole_ else f"{sequence.name}-{first + 1:06d}"
    return place.question(key, media, Annotations(regions=regions), dropped=dropped, sequence=sequence.name, first_frame=first)


_LAYOUT = "ROOT/SPLIT/SEQUENCE/seqinfo.ini, ROOT/SPLIT/SEQUENCE/img1/000001.jpg, ROOT/SPLIT/SEQUENCE/gt/gt.txt (train only)"
_OPTIONS = {"split": "train", "window": "100", "stride": "50", "ignored": "no"}
_SOURCE = "https://motchallenge.net/instructions"
READERS = {
    "mot17": DatasetReader("mot17", "tracking", _sequences, _LAYOUT, _SOURCE, {**_OPTIONS, "detector": "FRCNN"}),
    "mot20": DatasetReader("mot20", "tracking", _sequences, _LAYOUT, _SOURCE, _OPTIONS),
}
