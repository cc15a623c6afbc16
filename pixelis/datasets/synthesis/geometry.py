"""Geometry of boxes, points and masks, 0..1 of a view; places of calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np
from jaxtyping import Bool

from pixelis.errors import DataFailure
from pixelis.operations import masks
from pixelis.operations.geometry import WHOLE, chain, clamp, compose, relative, to_root
from pixelis.records import Box, ImageView, Point, Region
from pixelis.rewards.scorers import box_iou

MIN_SIDE = 0.02
"""Shortest side of a generated box: the grid of coordinates is too coarse for a smaller one."""
NEXT = 1.25
"""Ratio of distances from which on the nearer of two things is the one next to a third."""
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


# Measures


def middle(box: Sequence[float]) -> Point:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def area(box: Sequence[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def covered(box: Sequence[float], by: Sequence[float]) -> float:
    width, height = min(box[2], by[2]) - max(box[0], by[0]), min(box[3], by[3]) - max(box[1], by[1])
    return max(0.0, width) * max(0.0, height) / max(area(box), 1e-9)


def holds_middle(outer: Sequence[float], inner: Sequence[float]) -> bool:
    x, y = middle(inner)
    return outer[0] <= x <= outer[2] and outer[1] <= y <= outer[3]


def track_overlap(boxes: Sequence[Sequence[float]], truth: Sequence[Sequence[float]]) -> list[float]:
    return [box_iou(a, b) for a, b in zip(boxes, truth, strict=True)]


def heading(dx: float, dy: float, tolerance: float = 33.0) -> str | None:
    """The direction (left, right, up or down) within ``tolerance`` degrees of a movement (y points down)."""
    angle = math.degrees(math.atan2(dy, dx))
    for name, at in (("right", 0.0), ("down", 90.0), ("left", 180.0), ("up", -90.0)):
        if abs((angle - at + 180) % 360 - 180) <= tolerance:
            return name
    return None


def neighbours(
    box: Sequence[float], others: Sequence[Sequence[float]], width: int, height: int
) -> dict[str, int]:
    """The index of the box next to ``box`` by direction, where there is one beyond doubt.

    It lies within 33 degrees of the direction and beyond the edge of ``box``, and any other box within 60
    degrees is farther away by NEXT. ``width`` and ``height`` of the picture are in pixels.
    """
    x, y = middle(box)
    steps = [((u - x) * width, (v - y) * height) for u, v in map(middle, others)]
    result = {}
    for name, (ux, uy) in DIRECTIONS.items():
        ahead = [
            (math.hypot(dx, dy), i)
            for i, (dx, dy) in enumerate(steps)
            if ux * dx + uy * dy > math.hypot(dx, dy) / 2
        ]
        if not ahead:
            continue
        (distance, nearest), *rest = sorted(ahead)
        other = others[nearest]
        gap = {
            "left": box[0] - other[2],
            "right": other[0] - box[2],
            "up": box[1] - other[3],
            "down": other[1] - box[3],
        }[name]
        alone = all(farther >= NEXT * distance for farther, _ in rest)
        if gap >= 0 and alone and heading(*steps[nearest]) == name:
            result[name] = nearest
    return result


# Masks


def region_mask(region: Region, height: int, width: int) -> Bool[np.ndarray, "height width"] | None:
    if region.mask is not None:
        mask = masks.decode(region.mask)
        return mask.full() if (mask.height, mask.width) == (height, width) else None
    if region.outline:
        drawing = np.zeros((height, width), np.uint8)
        for polygon in region.outline:
            corners = np.asarray(polygon, float) * (width, height)
            cv2.fillPoly(drawing, [np.round(corners).astype(np.int32).reshape(-1, 1, 2)], 1)
        return drawing > 0 if drawing.any() else None
    return None


def mask_iou(one: Bool[np.ndarray, "height width"], other: Bool[np.ndarray, "height width"]) -> float:
    union = np.count_nonzero(one | other)
    return np.count_nonzero(one & other) / union if union else 0.0


def inner_point(mask: Bool[np.ndarray, "height width"]) -> Point:
    """The point of a mask that is farthest from its rim, 0..1."""
    depth = cv2.distanceTransform(np.pad(mask.astype(np.uint8), 1), cv2.DIST_L2, 3)[1:-1, 1:-1]
    row, column = np.unravel_index(int(depth.argmax()), mask.shape)
    return (float(column) + 0.5) / mask.shape[1], (float(row) + 0.5) / mask.shape[0]


# Boxes around boxes


def inside(box: Sequence[float]) -> Box:
    x0, y0, x1, y1 = (min(1.0, max(0.0, float(v))) for v in box)
    return x0, y0, x1, y1


def outward(box: Sequence[float], grid: float = 0.001) -> Box:
    """The smallest box on a grid that covers a box, inside 0..1; models write coordinates on a grid."""
    low, high = (math.floor(v / grid + 1e-6) for v in box[:2]), (math.ceil(v / grid - 1e-6) for v in box[2:])
    x0, y0, x1, y1 = (round(v, 6) for v in inside([step * grid for step in (*low, *high)]))
    return x0, y0, x1, y1


def grown(box: Sequence[float], share: float) -> Box:
    """A box enlarged by a share of its own width and height on each side, inside 0..1."""
    x0, y0, x1, y1 = box
    more_x, more_y = share * (x1 - x0), share * (y1 - y0)
    return inside((x0 - more_x, y0 - more_y, x1 + more_x, y1 + more_y))


def square_around(point: Point, side: float, grid: float) -> Box:
    """A square of about ``side`` on a grid with a point in its middle, shifted where it would leave 0..1."""
    steps = max(1, min(round(1 / grid), math.ceil(side / grid - 1e-6)))
    left, top = (min(max(round(at / grid - steps / 2), 0), round(1 / grid) - steps) for at in point)
    a, b, c, d = (round(v * grid, 6) for v in (left, top, left + steps, top + steps))
    return a, b, c, d


def near_miss(box: Box, rng: np.random.Generator, max_iou: float) -> Box:
    """A box of the same size beside ``box`` that does not show its middle; their IoU is at most ``max_iou``."""
    width, height = box[2] - box[0], box[3] - box[1]
    x, y = middle(box)
    turn = rng.uniform(0, 2 * np.pi)
    for reach in (0.9, 1.2, 1.6, 2.2):
        for step in range(8):
            angle = turn + step * np.pi / 4
            cx = min(max(x + reach * max(width, MIN_SIDE) * np.cos(angle), width / 2), 1 - width / 2)
            cy = min(max(y + reach * max(height, MIN_SIDE) * np.sin(angle), height / 2), 1 - height / 2)
            candidate = (cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2)
            beside = abs(cx - x) > width / 2 or abs(cy - y) > height / 2
            if beside and box_iou(candidate, box) <= max_iou:
                return inside(candidate)
    raise DataFailure("there is no room beside the region", code="no_room")


def oversized(box: Box, rng: np.random.Generator, max_iou: float) -> Box:
    """A box around ``box`` so large that their IoU is at most ``max_iou``."""
    width, height = box[2] - box[0], box[3] - box[1]
    factor = float(np.sqrt(1 / max_iou)) * rng.uniform(1.1, 1.6)
    w, h = min(1.0, width * factor), min(1.0, height * factor)
    left = min(max(box[2] - w, box[0] - rng.uniform(0.2, 0.8) * (w - width), 0.0), box[0], 1 - w)
    top = min(max(box[3] - h, box[1] - rng.uniform(0.2, 0.8) * (h - height), 0.0), box[1], 1 - h)
    result = inside((left, top, left + w, top + h))
    if box_iou(result, box) > max_iou:
        raise DataFailure("the region already fills the picture", code="no_room")
    return result


def same_place(box: Box, of: Box, to: Box) -> Box:
    """The box that lies to the region ``to`` as ``box`` lies to the region ``of``, inside 0..1."""
    width, height = max(of[2] - of[0], 1e-6), max(of[3] - of[1], 1e-6)
    shares = relative((of[0], of[1], of[0] + width, of[1] + height), box)
    return inside(compose((to[0], to[1], max(to[2], to[0] + 1e-6), max(to[3], to[1] + 1e-6)), shares))


def other_frames(frames: Sequence[int], count: int, rng: np.random.Generator) -> list[int]:
    """As many consecutive frames of a clip of ``count``, none of them among ``frames``."""
    size = len(frames)
    runs = [range(start, start + size) for start in range(count - size + 1)]
    others = [run for run in runs if set(frames).isdisjoint(run)]
    if not others:
        raise DataFailure("the clip has no other frames", code="no_room")
    return list(others[int(rng.integers(len(others)))])


# Places of calls


def place_of(op: str, arguments: Mapping[str, Any]) -> Box | None:
    """The region that a call is about, 0..1 of its target; None for a call about no region."""
    if (box := arguments.get("box")) is not None:
        return clamp(tuple(box))
    if (center := arguments.get("center")) is not None:
        half = 0.5 / float(arguments.get("factor") or 2.0)
        return clamp((center[0] - half, center[1] - half, center[0] + half, center[1] + half))
    if (point := arguments.get("point")) is not None:
        x, y = (min(max(float(v), MIN_SIDE), 1 - MIN_SIDE) for v in point)
        return x - MIN_SIDE, y - MIN_SIDE, x + MIN_SIDE, y + MIN_SIDE
    return WHOLE if op == "read_text" else None


def pointed_at(arguments: Mapping[str, Any], box: Box) -> dict[str, Any]:
    """The arguments of a call with its region replaced by ``box``, or its point by the middle of ``box``."""
    x0, y0, x1, y1 = (round(v, 4) for v in box)
    for key in ("point", "center"):
        if arguments.get(key) is not None:
            return {**arguments, key: [round((x0 + x1) / 2, 4), round((y0 + y1) / 2, 4)]}
    return {**arguments, "box": [x0, y0, x1, y1]}


def root_of(images: Sequence[ImageView], target: str, box: Box) -> tuple[str, int | None, Box]:
    """Media id, frame, and box of the whole picture or frame, for a box of a view or of a clip."""
    if all(image.id != target for image in images):
        return target, None, box
    links = chain(images, target)
    first = links[0]
    name = first.id if first.frame is None else str(first.parent)
    return name, first.frame, to_root(links, box)


def from_root(images: Sequence[ImageView], target: str, box: Box) -> Box:
    """The inverse of ``root_of``: a box of the whole picture as a box of the view."""
    if all(image.id != target for image in images):
        return box
    result = relative(to_root(chain(images, target)), box)
    if min(result) < -1e-6 or max(result) > 1 + 1e-6:
        raise DataFailure(f"the region lies outside {target}", code="no_room")
    return inside(result)
