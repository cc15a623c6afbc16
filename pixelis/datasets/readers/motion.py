"""Tracked people: MOT17 and MOT20, whole sequences or windows of them.

A line of ``gt/gt.txt``: frame (from 1), track, left, top, width, height (pixels from 1), whether it counts,
class, visibility. MOT17 has every sequence once per public detector.
"""

from __future__ import annotations

import configparser
from collections import defaultdict
from pathlib import Path
from typing import Any

from pixelis.datasets.annotation_geometry import box_xywh, image_size
from pixelis.datasets.fields import RowError, number, whole
from pixelis.datasets.readers.base import AnnotationFile, DatasetRoot, Rows, below, clip, tracked
from pixelis.errors import BadInput
from pixelis.records import Annotations, Region

MIN_WINDOW = 100
CLASSES = (
    "pedestrian",
    "person on vehicle",
    "car",
    "bicycle",
    "motorbike",
    "non motorized vehicle",
    "static person",
    "distractor",
    "occluder",
    "occluder on the ground",
    "occluder full",
    "reflection",
    "crowd",
)


def mot(root: DatasetRoot) -> Rows:
    window, stride = int(root.number("window")), int(root.number("stride"))
    if stride < 1 or (window != 0 and window < MIN_WINDOW):
        fix = f"a window has {MIN_WINDOW} frames or more, or 0 for all; a stride 1 or more"
        raise BadInput(f"{root.reader.name}: window={window}&stride={stride}", fix=fix)
    detector, with_ignored = root.options.get("detector", ""), root.flag("ignored")
    for folder in sorted(path for path in root.path("{split}").iterdir() if path.is_dir()):
        if detector and folder.name.count("-") > 1 and not folder.name.endswith(f"-{detector}"):
            continue
        file, starts = AnnotationFile(root, folder / "gt" / "gt.txt"), list[int]()
        with file.collect_errors(folder.name):
            frames, fps, size = _read_sequence(folder)
            regions = _read_truth(file, len(frames), size, with_ignored)
            length = min(window or len(frames), len(frames))
            # The last window ends with the sequence
            starts = [*range(0, len(frames) - length, stride), len(frames) - length]
        errors = file.take_errors()
        yield from errors
        for start in starts:
            numbered = [
                region.model_copy(update={"id": f"{region.track}.{frame}", "frame": frame})
                for frame in range(length)
                for region in regions.get(start + frame, ())
            ]
            key = folder.name if length == len(frames) else f"{folder.name}-{start + 1:06d}"
            media = clip(frames=frames[start : start + length], fps=fps, size=size)
            meta: dict[str, Any] = {
                "dropped": len(errors) or None,
                "sequence": folder.name,
                "first_frame": start,
            }
            yield file.question(key, media, Annotations(regions=numbered), **meta)


def _read_sequence(folder: Path) -> tuple[list[str], float, tuple[int, int]]:
    config = configparser.ConfigParser(interpolation=None)
    try:
        if not config.read(folder / "seqinfo.ini", encoding="utf-8"):
            raise RowError("file", "missing_file", f"no {folder / 'seqinfo.ini'}")
        values = config["Sequence"]
        size = image_size(whole(values["imWidth"], "imWidth"), whole(values["imHeight"], "imHeight"))
        images, suffix, length = values["imDir"], values["imExt"], whole(values["seqLength"], "seqLength", 1)
        fps = number(values["frameRate"], "frameRate")
    except (configparser.Error, KeyError, UnicodeDecodeError) as error:
        raise RowError("Sequence", "not_ini", f"seqinfo.ini: {' '.join(str(error).split())}") from None
    frames = [below(folder, f"{images}/{n:06d}{suffix}", "imDir") for n in range(1, length + 1)]
    return frames, fps, size


def _read_truth(
    file: AnnotationFile, length: int, size: tuple[int, int], with_ignored: bool
) -> dict[int, list[Region]]:
    """The regions of each frame; with_ignored: also those that do not count."""
    if not file.path.is_file():
        message = f"no {file.path}: the ground truth of test sequences is not public"
        raise RowError("gt", "missing_file", message)
    regions, seen = defaultdict[int, list[Region]](list), set[tuple[int, int]]()
    with file.path.open(encoding="utf-8", errors="replace") as lines:
        for line_number, line in enumerate(lines, 1):
            with file.collect_errors(f"line {line_number}"):
                first, id, left, top, width, height, counts, kind, visibility = line.strip().split(",")[:9]
                frame, track, category = whole(first, "frame", 1), whole(id, "id"), whole(kind, "class", 1)
                if frame > length:
                    raise RowError("frame", "outside", f"frame {frame} of {length}")
                if category > len(CLASSES):
                    raise RowError("class", "unknown_id", f"{category} is not a class")
                if (frame, track) in seen:
                    message = f"an earlier line has track {track} in frame {frame}"
                    raise RowError("id", "duplicate_id", message)
                seen.add((frame, track))
                if not number(counts, "conf") and not with_ignored:
                    continue
                x, y, w, h = (number(value, "bbox") for value in (left, top, width, height))
                box = box_xywh([x - 1, y - 1, w, h], *size)
                attributes = {"visibility": number(visibility, "visibility")}
                region = tracked(track, frame - 1, CLASSES[category - 1], box, attributes=attributes)
                regions[frame - 1].append(region)
    return regions
