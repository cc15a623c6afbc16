"""Near misses: boxes beside or too large, points off the object, other frames. Plain geometry, 0..1 of one target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pixelis.errors import DataFailure
from pixelis.operations import geometry
from pixelis.records import Box, ImageView
from pixelis.rewards.scorers import box_iou

LEAST = 0.02
"""Shortest side of a box that is made, 0..1: below it a view shows nothing and the grid of coordinates is too coarse."""


def place_of(op: str, arguments: Mapping[str, Any]) -> Box | None:
    """The region that a call is about, 0..1 of its target: its box, a small square around its point, the square of a zoom.

    Text that is read without a box is read in all of it.
    """
    if (box := arguments.get("box")) is not None:
        return geometry.clamp(tuple(box))
    if (center := arguments.get("center")) is not None:
        half = 0.5 / float(arguments.get("factor") or 2.0)
        return geometry.clamp((center[0] - half, center[1] - half, center[0] + half, center[1] + half))
    if (point := arguments.get("point")) is not None:
        return around(point, LEAST)
    return geometry.WHOLE if op == "read_text" else None


def around(point: Sequence[float], half: float) -> Box:
    """The square of side ``2 * half`` around a point, moved inside 0..1."""
    x, y = (min(max(float(v), half), 1 - half) for v in point)
    return x - half, y - half, x + half, y + half


def moved(arguments: Mapping[str, Any], box: Box) -> dict[str, Any]:
    """The arguments with their place put to ``box`` (a point, or the center of a zoom, to its middle)."""
    x0, y0, x1, y1 = (round(v, 4) for v in box)
    middle = [round((x0 + x1) / 2, 4), round((y0 + y1) / 2, 4)]
    changed = dict(arguments)
    for key in ("point", "center"):
        if changed.get(key) is not None:
            return {**changed, key: middle}
    return {**changed, "box": [x0, y0, x1, y1]}


def near_miss(box: Box, rng: np.random.Generator, most_iou: float) -> Box:
    """A box of the same size beside ``box``, within 0..1: their IoU is at most ``most_iou``, and it does not show its middle.

    DataFailure ``no_room`` when the picture leaves no such place.
    """
    width, height = box[2] - box[0], box[3] - box[1]
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    turn = rng.uniform(0, 2 * np.pi)
    for reach in (0.9, 1.2, 1.6, 2.2):
        for step in range(8):
            angle = turn + step * np.pi / 4
            cx = min(max(x + reach * max(width, LEAST) * np.cos(angle), width / 2), 1 - width / 2)
            cy = min(max(y + reach * max(height, LEAST) * np.sin(angle), height / 2), 1 - height / 2)
            found = (cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2)
            beside = abs(cx - x) > width / 2 or abs(cy - y) > height / 2
            if beside and box_iou(found, box) <= most_iou:
                return _inside(found)
    raise DataFailure("no place beside the region", code="no_room")


def oversized(box: Box, rng: np.random.Generator, most_iou: float) -> Box:
    """A box around ``box`` that is so large that their IoU is at most ``most_iou``; DataFailure ``no_room``."""
    width, height = box[2] - box[0], box[3] - box[1]
    factor = float(np.sqrt(1 / most_iou)) * rng.uniform(1.1, 1.6)
    w, h = min(1.0, width * factor), min(1.0, height * factor)
    left = min(max(box[2] - w, box[0] - rng.uniform(0.2, 0.8) * (w - width), 0.0), box[0], 1 - w)
    top = min(max(box[3] - h, box[1] - rng.uniform(0.2, 0.8) * (h - height), 0.0), box[1], 1 - h)
    result = _inside((left, top, left + w, top + h))
    if box_iou(result, box) > most_iou:
        raise DataFailure("the region fills the picture already", code="no_room")
    return result


def other_frames(frames: Sequence[int], count: int, rng: np.random.Generator) -> list[int]:
    """As many frames of a clip of ``count`` in a row of the same pace, none of them among ``frames``; DataFailure ``no_room``."""
    taken = set(frames)
    runs = [
        start for start in range(count) if not taken & set(range(start, start + len(frames))) and start + len(frames) <= count
    ]
    if not runs:
        raise DataFailure("the clip has no other frames", code="no_room")
    start = int(rng.choice(runs))
    return list(range(start, start + len(frames)))


def root_of(images: Sequence[ImageView], target: str, box: Box) -> tuple[str, int | None, Box]:
    """Media id, frame, and box of the whole picture or frame, for a box of a view; OperationError ``bad_target``.

    A clip as a whole (the target of track_object) is its own root.
    """
    if all(image.id != target for image in images):
        return target, None, box
    links = geometry.chain(images, target)
    first = links[0]
    name = first.id if first.frame is None else str(first.parent)
    return name, first.frame, geometry.compose(geometry.to_root(links), box)


def from_root(images: Sequence[ImageView], target: str, box: Box) -> Box:
    """The inverse of ``root_of``: a box of the whole picture as a box of the view; DataFailure ``no_room`` when it is outside."""
    if all(image.id != target for image in images):
        return box
    inside = geometry.relative(geometry.to_root(geometry.chain(images, target)), box)
    if inside[0] < -1e-6 or inside[1] < -1e-6 or inside[2] > 1 + 1e-6 or inside[3] > 1 + 1e-6:
        raise DataFailure(f"the place lies outside {target}", code="no_room")
    return _inside(inside)


def same_place(box: Box, of: Box, to: Box) -> Box:
    """What ``box`` is to the region ``of``, around the region ``to``: same margins in parts of the region, within 0..1."""
    w, h = max(of[2] - of[0], 1e-6), max(of[3] - of[1], 1e-6)
    a, b = max(to[2] - to[0], 1e-6), max(to[3] - to[1], 1e-6)
    found = (
        to[0] + (box[0] - of[0]) / w * a,
        to[1] + (box[1] - of[1]) / h * b,
        to[2] + (box[2] - of[2]) / w * a,
        to[3] + (box[3] - of[3]) / h * b,
    )
    return _inside(found)


def _inside(box: Box) -> Box:
    x0, y0, x1, y1 = (min(1.0, max(0.0, float(v))) for v in box)
    return x0, y0, x1, y1
