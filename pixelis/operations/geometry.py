"""Boxes: validation, clamping, and mapping from a view back to the full-resolution picture.

A box is x0, y0, x1, y1 in 0..1 of one view. A view stores its parent and its box in the parent, so a chain of
crops composes to a box of the question's own picture.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pixelis.errors import OperationError
from pixelis.records import Box, ImageView, Point

MIN_SIDE = 4
"""Shortest side of a region, in full-resolution pixels."""

WHOLE: Box = (0.0, 0.0, 1.0, 1.0)


def as_box(value: Any) -> Box:
    """Validate four finite numbers in order; the range is not checked. Raises ``bad_box``."""
    x0, y0, x1, y1 = _finite(value, 4, "a box is four finite numbers x0,y0,x1,y1", "bad_box")
    if x0 >= x1 or y0 >= y1:
        raise OperationError("a box needs x0 < x1 and y0 < y1", code="bad_box")
    return x0, y0, x1, y1


def as_point(value: Any) -> Point:
    """Validate two finite numbers 0..1. Raises OperationError ``bad_point`` or ``out_of_range``."""
    x, y = _finite(value, 2, "a point is two finite numbers x,y", "bad_point")
    if not (0 <= x <= 1 and 0 <= y <= 1):
        raise OperationError("the point lies outside the picture", code="out_of_range")
    return x, y


def _finite(value: Any, count: int, problem: str, code: str) -> list[float]:
    if isinstance(value, (list, tuple)) and len(value) == count:
        with contextlib.suppress(OverflowError):
            numbers = [float(v) for v in value if type(v) in (int, float) or isinstance(v, np.floating)]
            if len(numbers) == count and all(map(math.isfinite, numbers)):
                return numbers
    raise OperationError(problem, code=code)


def clamp(box: Box) -> Box:
    """Clamp a box to the view. Raises OperationError ``out_of_range`` for a box outside it."""
    x0, y0, x1, y1 = as_box(box)
    if x0 >= 1 or y0 >= 1 or x1 <= 0 or y1 <= 0:
        raise OperationError("the box lies outside the picture", code="out_of_range")
    return max(x0, 0.0), max(y0, 0.0), min(x1, 1.0), min(y1, 1.0)


def compose(outer: Box, inner: Box) -> Box:
    """Convert a box of the region ``outer`` to a box of the region's parent."""
    width, height = outer[2] - outer[0], outer[3] - outer[1]
    return (
        outer[0] + inner[0] * width,
        outer[1] + inner[1] * height,
        outer[0] + inner[2] * width,
        outer[1] + inner[3] * height,
    )


def relative(outer: Box, inner: Box) -> Box:
    """The inverse of `compose`: convert a box of the parent to a box of ``outer``."""
    width, height = outer[2] - outer[0], outer[3] - outer[1]
    return (
        (inner[0] - outer[0]) / width,
        (inner[1] - outer[1]) / height,
        (inner[2] - outer[0]) / width,
        (inner[3] - outer[1]) / height,
    )


def chain(images: Sequence[ImageView], target: str) -> list[ImageView]:
    """The views from the question's picture or frame down to ``target``. Raises ``bad_target``."""
    by_id = {image.id: image for image in images}
    if target not in by_id:
        names = [image.id for image in images]
        known = ", ".join(names if len(names) <= 6 else [*names[:5], "...", names[-1]]) or "none"
        raise OperationError(f"no image {target[:20]}, use {known}", code="bad_target")
    links = [by_id[target]]
    while (parent := links[-1].parent) is not None and links[-1].frame is None:
        if parent not in by_id or len(links) > len(by_id):
            raise OperationError(f"{target} has no picture behind it", code="bad_target")
        links.append(by_id[parent])
    return links[::-1]


def to_root(links: Sequence[ImageView], box: Box = WHOLE) -> Box:
    """Convert a box of the last view of a chain to a box of the first view's picture."""
    for view in reversed(links):
        if view.box is not None:
            box = compose(view.box, box)
    return box


def place_of(images: Sequence[ImageView], view: str) -> tuple[str, int | None, Box]:
    """Media id, frame and box of the question's own picture or frame that a view shows. Raises ``bad_target``."""
    links = chain(images, view)
    first = links[0]
    return (first.id if first.frame is None else str(first.parent)), first.frame, to_root(links)


def to_pixels(box: Box, width: int, height: int) -> tuple[int, int, int, int]:
    """Pixel edges of a box of a width x height picture, each rounded to the nearest. Raises ``too_small``."""
    is_empty = box[0] == box[2] or box[1] == box[3]
    x0, y0, x1, y1 = clamp(box) if not is_empty else (0.0,) * 4
    left, top, right, bottom = round(x0 * width), round(y0 * height), round(x1 * width), round(y1 * height)
    if right - left < MIN_SIDE or bottom - top < MIN_SIDE:
        raise OperationError(
            f"the region is {right - left}x{bottom - top} pixels, at least {MIN_SIDE}", code="too_small"
        )
    return left, top, right, bottom
