"""Tracked people: MOT17 and MOT20, whole sequences or windows of them.

https://motchallenge.net/instructions: ``SEQUENCE/seqinfo.ini`` has size, length and frame rate; a line of ``gt/gt.txt`` is frame
(from 1), track, left, top, width, height (pixels from 1), whether it counts, class, visibility. MOT17 has every sequence three
times, once per public detector, with the same ground truth.
"""

from __future__ import annotations

import configparser
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pixelis.datasets.annotation_geometry import box_xywh, image_size
from pixelis.datasets.fields import RowError, number, whole
from pixelis.datasets.readers.base import AnnotationFile, DatasetRoot, Rows, below, clip
from pixelis.errors import BadInput
from pixelis.records import Annotations, Question, Region

MIN_WINDOW = 100
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


def mot(root: DatasetRoot) -> Rows:
    window, stride = int(root.number("window")), int(root.number("stride"))
    if stride < 1 or (window != 0 and window < MIN_WINDOW):
        raise BadInput(f"window={window}&stride={stride}: a window has at least {MIN_WINDOW} frames, or 0 for all; a stride 1")
    detector, with_ignored = root.options.get("detector", ""), root.flag("ignored")
    for folder in sorted(path for path in root.path("{split}").iterdir() if path.is_dir()):
        if detector and folder.name.count("-") > 1 and not folder.name.endswith(f"-{detector}"):
            continue
        info, truth = AnnotationFile(root, folder / "seqinfo.ini"), AnnotationFile(root, folder / "gt" / "gt.txt")
        windows: list[tuple[int, int]] = []
        with info.collect_errors(folder.name):
            sequence = _read_sequence(folder)
            regions = _read_truth(truth, sequence, with_ignored)
            windows += _windows(len(sequence.frames), window, stride)
        yield from info.take_errors()
        errors = truth.take_errors()
        yield from errors
        for first, last in windows:
            yield _window_question(truth, sequence, regions, first, last, len(errors))


def _windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int]]:
    """First frame and end of each window; the last one ends with the sequence, which may be shorter than a window."""
    if not window or length <= window:
        yield 0, length
        return
    for first in range(0, length - window + 1, stride):
        yield first, first + window
    if (length - window) % stride:
        yield length - window, length


def _read_sequence(folder: Path) -> _Sequence:
    config = configparser.ConfigParser(interpolation=None)
    try:
        files = config.read(folder / "seqinfo.ini", encoding="utf-8")
        values = config["Sequence"] if files else {}
    except (configparser.Error, KeyError, UnicodeDecodeError) as error:
        raise RowError("Sequence", "not_ini", " ".join(str(error).split())) from None
    if not files:
        raise RowError("file", "missing_file", f"no {folder / 'seqinfo.ini'}")
    if missing := [key for key in ("imdir", "framerate", "seqlength", "imwidth", "imheight", "imext") if key not in values]:
        raise RowError(missing[0], "missing_column", "is missing")
    width, height = image_size(whole(values["imwidth"], "imWidth"), whole(values["imheight"], "imHeight"))
    images, length = values["imdir"], whole(values["seqlength"], "seqLength", 1)
    frames = [below(folder, f"{images}/{n:06d}{values['imext']}", "imDir") for n in range(1, length + 1)]
    fps = number(values["framerate"], "frameRate")
    if fps <= 0:
        raise RowError("frameRate", "not_a_number", f"{fps:g} frames a second")
    return _Sequence(folder.name, frames, fps, width, height)


def _read_truth(file: AnnotationFile, sequence: _Sequence, with_ignored: bool) -> dict[int, list[Region]]:
    """The regions of each frame; with_ignored: also those that do not count."""
    if not file.path.is_file():
        raise RowError("gt", "missing_file", f"no {file.path}: the ground truth of test sequences is not public")
    regions = defaultdict(list)
    with file.path.open(encoding="utf-8", errors="replace") as lines:
        for line_number, line in enumerate(lines, 1):
            with file.collect_errors(f"line {line_number}"):
                region = _region(line.strip().split(","), sequence, file, with_ignored)
                if region is not None and region.frame is not None:
                    regions[region.frame].append(region)
    return regions


def _region(fields: list[str], sequence: _Sequence, file: AnnotationFile, with_ignored: bool) -> Region | None:
    if len(fields) < 9:
        raise RowError("all", "missing_column", f"{len(fields)} fields, expected 9")
    frame, track, category = whole(fields[0], "frame", 1), whole(fields[1], "id"), whole(fields[7], "class", 1)
    if frame > len(sequence.frames):
        raise RowError("frame", "outside", f"frame {frame} of {len(sequence.frames)}")
    if category > len(CLASSES):
        raise RowError("class", "unknown_id", f"{category} is not a class")
    file.unique((frame, track), "frame, id")
    if not number(fields[6], "conf") and not with_ignored:
        return None
    x, y, width, height = (number(value, "bbox") for value in fields[2:6])
    return Region(
        id=f"{track}.{frame}",
        label=CLASSES[category - 1],
        box=box_xywh([x - 1, y - 1, width, height], sequence.width, sequence.height),
        media="vid0",
        frame=frame - 1,
        track=str(track),
        attributes={"visibility": number(fields[8], "visibility")},
    )


def _window_question(
    file: AnnotationFile, sequence: _Sequence, regions: dict[int, list[Region]], first: int, last: int, dropped: int
) -> Question:
    numbered = [
        region.model_copy(update={"id": f"{region.track}.{frame - first}", "frame": frame - first})
        for frame in range(first, last)
        for region in regions.get(frame, ())
    ]
    media = clip(frames=sequence.frames[first:last], fps=sequence.fps, size=(sequence.width, sequence.height))
    key = sequence.name if last - first == len(sequence.frames) else f"{sequence.name}-{first + 1:06d}"
    annotations = Annotations(regions=numbered)
    return file.question(key, media, annotations, dropped=dropped or None, sequence=sequence.name, first_frame=first)
