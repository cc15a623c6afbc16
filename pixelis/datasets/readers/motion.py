"""Tracked people: MOT17 and MOT20, whole sequences or windows of them.

https://motchallenge.net/instructions: a line of ``gt/gt.txt`` is frame (from 1), track, left, top, width,
height (pixels from 1), whether it counts, class, visibility. MOT17 has every sequence once per public
detector.
"""

from __future__ import annotations

import configparser
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from pixelis.datasets.annotation_geometry import box_xywh, image_size
from pixelis.datasets.fields import RowError, number, whole
from pixelis.datasets.readers.base import AnnotationFile, DatasetRoot, Rows, below, clip
from pixelis.errors import BadInput
from pixelis.records import Annotations, Region

MIN_WINDOW = 100
CLASSES = (
    *(
        "pedestrian",
        "person on vehicle",
        "car",
        "bicycle",
        "motorbike",
        "non motorized vehicle",
        "static person",
    ),
    *("distractor", "occluder", "occluder on the ground", "occluder full", "reflection", "crowd"),
)


class _Sequence(NamedTuple):
    name: str
    frames: list[str]
    fps: float
    size: tuple[int, int]


def mot(root: DatasetRoot) -> Rows:
    window, stride = int(root.number("window")), int(root.number("stride"))
    if stride < 1 or (window != 0 and window < MIN_WINDOW):
        raise BadInput(
            f"window={window}&stride={stride}: a window has at least {MIN_WINDOW} frames, or 0 for "
            "all; a "
            "stride 1"
        )
    detector, with_ignored = root.options.get("detector", ""), root.flag("ignored")
    for folder in sorted(path for path in root.path("{split}").iterdir() if path.is_dir()):
        if detector and folder.name.count("-") > 1 and not folder.name.endswith(f"-{detector}"):
            continue
        info = AnnotationFile(root, folder / "seqinfo.ini")
        truth = AnnotationFile(root, folder / "gt" / "gt.txt")
        starts = list[int]()
        with info.collect_errors(folder.name):
            sequence = _read_sequence(folder)
            regions = _read_truth(truth, sequence, with_ignored)
            length = len(sequence.frames)
            size = min(window or length, length)
            # The last window ends with the sequence
            starts = [*range(0, length - size, stride), length - size]
        yield from info.take_errors()
        errors = truth.take_errors()
        yield from errors
        for start in starts:
            numbered = [
                region.model_copy(update={"id": f"{region.track}.{frame}", "frame": frame})
                for frame in range(size)
                for region in regions.get(start + frame, ())
            ]
            key = sequence.name if size == length else f"{sequence.name}-{start + 1:06d}"
            media = clip(frames=sequence.frames[start : start + size], fps=sequence.fps, size=sequence.size)
            meta = {"dropped": len(errors) or None, "sequence": sequence.name, "first_frame": start}
            yield truth.question(key, media, Annotations(regions=numbered), **meta)  # type: ignore[arg-type]


def _read_sequence(folder: Path) -> _Sequence:
    config = configparser.ConfigParser(interpolation=None)
    try:
        files = config.read(folder / "seqinfo.ini", encoding="utf-8")
        values = config["Sequence"] if files else {}
    except (configparser.Error, KeyError, UnicodeDecodeError) as error:
        raise RowError("Sequence", "not_ini", " ".join(str(error).split())) from None
    if not files:
        raise RowError("file", "missing_file", f"no {folder / 'seqinfo.ini'}")
    if missing := [
        key
        for key in ("imdir", "framerate", "seqlength", "imwidth", "imheight", "imext")
        if key not in values
    ]:
        raise RowError(missing[0], "missing_column", "is missing")
    size = image_size(whole(values["imwidth"], "imWidth"), whole(values["imheight"], "imHeight"))
    images, length = values["imdir"], whole(values["seqlength"], "seqLength", 1)
    frames = [below(folder, f"{images}/{n:06d}{values['imext']}", "imDir") for n in range(1, length + 1)]
    fps = number(values["framerate"], "frameRate")
    if fps <= 0:
        raise RowError("frameRate", "not_a_number", f"{fps:g} frames a second")
    return _Sequence(folder.name, frames, fps, size)


def _read_truth(file: AnnotationFile, sequence: _Sequence, with_ignored: bool) -> dict[int, list[Region]]:
    """The regions of each frame; with_ignored: also those that do not count."""
    if not file.path.is_file():
        raise RowError(
            "gt", "missing_file", f"no {file.path}: the ground truth of test sequences is not public"
        )
    regions, seen = defaultdict[int, list[Region]](list), set[tuple[int, int]]()
    with file.path.open(encoding="utf-8", errors="replace") as lines:
        for line_number, line in enumerate(lines, 1):
            with file.collect_errors(f"line {line_number}"):
                fields = line.strip().split(",")
                if len(fields) < 9:
                    raise RowError("all", "missing_column", f"{len(fields)} fields, expected 9")
                frame = whole(fields[0], "frame", 1)
                track = whole(fields[1], "id")
                category = whole(fields[7], "class", 1)
                if frame > len(sequence.frames):
                    raise RowError("frame", "outside", f"frame {frame} of {len(sequence.frames)}")
                if category > len(CLASSES):
                    raise RowError("class", "unknown_id", f"{category} is not a class")
                if (frame, track) in seen:
                    raise RowError(
                        "id", "duplicate_id", f"an earlier line has track {track} in frame {frame}"
                    )
                seen.add((frame, track))
                if not number(fields[6], "conf") and not with_ignored:
                    continue
                x, y, width, height = (number(value, "bbox") for value in fields[2:6])
                regions[frame - 1].append(
                    Region(
                        id=f"{track}.{frame}",
                        label=CLASSES[category - 1],
                        box=box_xywh([x - 1, y - 1, width, height], *sequence.size),
                        media="vid0",
                        frame=frame - 1,
                        track=str(track),
                        attributes={"visibility": number(fields[8], "visibility")},
                    )
                )
    return regions
