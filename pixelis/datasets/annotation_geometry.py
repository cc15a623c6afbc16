"""Converts annotated boxes, polygons and masks from pixels to 0..1 of a picture, with checks.

Faults: ``not_a_number`` (also NaN and infinity), ``empty_box`` (no area), ``outside`` (nothing of it inside the picture),
``bad_polygon``, ``bad_mask``, ``empty_mask``, ``bad_size``. What lies partly outside is clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as coco

from pixelis.datasets.fields import RowError, number
from pixelis.errors import OperationError
from pixelis.operations.masks import MAX_PIXELS, decode
from pixelis.records import Box, Event, Point

LARGEST = 100_000
"""Longest side of a picture, in pixels, that an annotation may claim."""


def sides(width: Any, height: Any) -> tuple[int, int]:
    """Width and height of a picture in pixels."""
    for name, side in (("width", width), ("height", height)):
        if not isinstance(side, int) or isinstance(side, bool) or not 0 < side <= LARGEST:
            raise RowError(name, "bad_size", f"{side!r:.60} is no side of a picture")
    if width * height > MAX_PIXELS:
        raise RowError("width", "bad_size", f"{width} x {height} are more than {MAX_PIXELS} pixels")
    return width, height


def header_size(path: Path, column: str = "picture") -> tuple[int, int]:
    """Width and height that a picture's header tells, as it is shown; nothing is decoded. For annotations that do not say it."""
    try:
        with Image.open(path) as image:
            turned = image.getexif().get(274, 1) in (5, 6, 7, 8)
            return (image.height, image.width) if turned else (image.width, image.height)
    except FileNotFoundError:
        raise RowError(column, "media_not_found", f"no {path}"[:300]) from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise RowError(column, "bad_media", f"{path}: {error}"[:300]) from None


def box(corners: Any, width: float, height: float, column: str = "bbox") -> Box:
    """x0, y0, x1, y1 in pixels -> 0..1, clipped to the picture."""
    if not isinstance(corners, (list, tuple)) or len(corners) != 4:
        raise RowError(column, "wrong_type", f"{corners!r:.60} are not four numbers")
    x0, y0, x1, y1 = (number(value, column) for value in corners)
    if not (x0 < x1 and y0 < y1):
        raise RowError(column, "empty_box", f"{[x0, y0, x1, y1]} has no area")
    left, right = (min(1.0, max(0.0, value / width)) for value in (x0, x1))
    top, bottom = (min(1.0, max(0.0, value / height)) for value in (y0, y1))
    if not (left < right and top < bottom):
        raise RowError(column, "outside", f"{[x0, y0, x1, y1]} lies outside the picture of {width:g} x {height:g}")
    return left, top, right, bottom


def box_xywh(numbers: Any, width: float, height: float, column: str = "bbox") -> Box:
    """COCO's left, top, width, height in pixels -> 0..1, clipped to the picture."""
    if not isinstance(numbers, (list, tuple)) or len(numbers) != 4:
        raise RowError(column, "wrong_type", f"{numbers!r:.60} are not four numbers")
    x, y, w, h = (number(value, column) for value in numbers)
    if w <= 0 or h <= 0:
        raise RowError(column, "empty_box", f"{[x, y, w, h]} has no area")
    return box([x, y, x + w, y + h], width, height, column)


def outline(points: Any, width: float, height: float, column: str) -> list[Point]:
    """A polygon ``[[x, y], ...]`` or ``[x, y, x, y, ...]`` in pixels -> points 0..1, clipped to the picture."""
    return [(x, y) for x, y in _clipped(points, width, height, column).tolist()]


def _clipped(points: Any, width: float, height: float, column: str) -> np.ndarray:
    """float64 [n, 2] in 0..1."""
    if not isinstance(points, (list, tuple)):
        raise RowError(column, "bad_polygon", f"{points!r:.60} is no polygon")
    try:
        values = np.asarray(points)
    except ValueError:
        raise RowError(column, "bad_polygon", f"{points!r:.60} are not pairs") from None
    if values.size < 6 or values.size % 2 or (values.ndim != 1 and values.shape[1:] != (2,)):
        raise RowError(column, "bad_polygon", f"{values.size} numbers are no polygon")
    if values.dtype.kind not in "if" or not np.isfinite(values).all():
        raise RowError(column, "not_a_number", f"{points!r:.60} are not all finite numbers")
    return np.clip(values.reshape(-1, 2) / (width, height), 0.0, 1.0)


def around(*outlines: Sequence[Point], column: str) -> Box:
    """The box around polygons that are 0..1 already."""
    xs, ys = [x for points in outlines for x, _ in points], [y for points in outlines for _, y in points]
    return box([min(xs), min(ys), max(xs), max(ys)], 1.0, 1.0, column)


def mask_code(segmentation: Any, width: int, height: int, column: str = "segmentation") -> dict[str, Any]:
    """COCO's run-length code of polygons in pixels, of an uncompressed code or of a compressed one, over width x height."""
    if isinstance(segmentation, dict):
        try:
            mask = decode(segmentation, height, width)
        except OperationError as error:
            code = "empty_mask" if error.code == "nothing_found" else "bad_mask"
            raise RowError(column, code, error.message) from None
        return dict(segmentation) if isinstance(segmentation["counts"], str) else mask.encode()
    if not isinstance(segmentation, (list, tuple)) or not segmentation:
        raise RowError(column, "bad_polygon", f"{segmentation!r:.60} are no polygons")
    # Clipped first: the memory that pycocotools takes follows the length of the edges.
    flat = [(_clipped(polygon, width, height, column) * (width, height)).ravel().tolist() for polygon in segmentation]
    code = coco.merge(coco.frPyObjects(flat, height, width))
    if not coco.area(code):
        raise RowError(column, "empty_mask", "the polygons hold no pixel")
    return {"size": [height, width], "counts": code["counts"].decode()}


def event(words: str, start: Any, end: Any, duration: float | None = None, column: str = "timestamps") -> Event:
    """Something from ``start`` to ``end`` seconds, clipped to a clip of ``duration``.

    Faults ``not_a_number``, ``empty_span`` and ``outside``.
    """
    begin, stop = number(start, column), number(end, column)
    if begin >= stop:
        raise RowError(column, "empty_span", f"from {begin:g} to {stop:g} seconds nothing can happen")
    if stop <= 0 or (duration is not None and begin >= duration):
        raise RowError(column, "outside", f"{begin:g} to {stop:g} seconds lie outside the clip")
    return Event(text=words, start=max(0.0, begin), end=stop if duration is None else min(stop, duration))
