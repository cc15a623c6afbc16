"""Annotated boxes, polygons, masks and spans as checked fractions; what lies partly outside is clipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image
from pycocotools import mask as coco

from pixelis.datasets.fields import RowError, number
from pixelis.errors import OperationError
from pixelis.operations.masks import MAX_PIXELS, decode
from pixelis.records import Box, Event, Point

MAX_SIDE = 100_000
"""Longest side of an image, in pixels, that an annotation may claim."""


def image_size(width: Any, height: Any) -> tuple[int, int]:
    for column, side in (("width", width), ("height", height)):
        if not isinstance(side, int) or isinstance(side, bool) or not 0 < side <= MAX_SIDE:
            raise RowError(column, "bad_size", f"{side!r:.60} is not a side of an image in pixels")
    if width * height > MAX_PIXELS:
        raise RowError("width", "bad_size", f"{width} x {height} are more than {MAX_PIXELS} pixels")
    return width, height


def header_size(path: Path, column: str = "picture") -> tuple[int, int]:
    """Width and height of an image file as shown, from its header. RowError."""
    try:
        with Image.open(path) as image:
            rotated = image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
            return (image.height, image.width) if rotated else (image.width, image.height)
    except FileNotFoundError:
        raise RowError(column, "media_not_found", f"no {path}"[:300]) from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise RowError(column, "bad_media", f"{path}: {error}"[:300]) from None


def box_xyxy(corners: Any, width: float, height: float, column: str = "bbox") -> Box:
    """x0, y0, x1, y1 in pixels -> 0..1, clipped to the image."""
    x0, y0, x1, y1 = edges = _four_numbers(corners, column)
    if not (x0 < x1 and y0 < y1):
        raise RowError(column, "empty_box", f"{edges} has no area")
    left, right = (min(1.0, max(0.0, x / width)) for x in (x0, x1))
    top, bottom = (min(1.0, max(0.0, y / height)) for y in (y0, y1))
    if not (left < right and top < bottom):
        raise RowError(column, "outside", f"{edges} lies outside the image of {width:g} x {height:g}")
    return left, top, right, bottom


def box_xywh(sides: Any, width: float, height: float, column: str = "bbox") -> Box:
    """COCO's left, top, width, height in pixels -> 0..1, clipped to the image."""
    x, y, w, h = _four_numbers(sides, column)
    if w <= 0 or h <= 0:
        raise RowError(column, "empty_box", f"{[x, y, w, h]} has no area")
    return box_xyxy([x, y, x + w, y + h], width, height, column)


def _four_numbers(values: Any, column: str) -> list[float]:
    if not isinstance(values, (list, tuple)) or len(values) != 4:
        raise RowError(column, "wrong_type", f"{values!r:.60} are not four numbers")
    return [number(value, column) for value in values]


def polygon_points(polygon: Any, width: float, height: float, column: str) -> list[Point]:
    """A polygon ``[[x, y], ...]`` or ``[x, y, x, y, ...]`` in pixels -> points 0..1."""
    return [(x, y) for x, y in _clipped(polygon, width, height, column).tolist()]


def _clipped(polygon: Any, width: float, height: float, column: str) -> np.ndarray:
    """float64 [n, 2] in 0..1."""
    try:
        values = np.asarray(polygon)
    except ValueError:
        raise RowError(column, "bad_polygon", f"{polygon!r:.60} are not pairs of numbers") from None
    if values.size < 6 or values.size % 2 or (values.ndim != 1 and values.shape[1:] != (2,)):
        raise RowError(column, "bad_polygon", f"{polygon!r:.60} is not a polygon")
    if values.dtype.kind not in "if" or not np.isfinite(values).all():
        raise RowError(column, "not_a_number", f"{polygon!r:.60} are not all finite numbers")
    return np.clip(values.reshape(-1, 2) / (width, height), 0.0, 1.0)


def enclosing_box(points: Sequence[Point], column: str) -> Box:
    xs, ys = zip(*points, strict=True)
    return box_xyxy([min(xs), min(ys), max(xs), max(ys)], 1.0, 1.0, column)


def mask_rle(segmentation: Any, width: int, height: int, column: str = "segmentation") -> dict[str, Any]:
    """COCO's compressed run-length code of polygons in pixels, or of a code, compressed or not."""
    if isinstance(segmentation, dict):
        try:
            mask = decode(segmentation, height, width)
        except OperationError as error:
            code = "empty_mask" if error.code == "nothing_found" else "bad_mask"
            raise RowError(column, code, error.message) from None
        return dict(segmentation) if isinstance(segmentation["counts"], str) else mask.encode()
    if not isinstance(segmentation, (list, tuple)) or not segmentation:
        raise RowError(column, "bad_polygon", f"{segmentation!r:.60} are not polygons")
    # Clipped first, because the memory that pycocotools takes grows with the length of the edges.
    flat = [
        (_clipped(polygon, width, height, column) * (width, height)).ravel().tolist()
        for polygon in segmentation
    ]
    code = coco.merge(coco.frPyObjects(flat, height, width))
    if not coco.area(code):
        raise RowError(column, "empty_mask", "the polygons contain no pixel")
    return {"size": [height, width], "counts": code["counts"].decode()}


def time_span(
    label: str, start: Any, end: Any, duration: float | None = None, column: str = "timestamps"
) -> Event:
    """Clipped to a clip of ``duration`` seconds."""
    first, last = number(start, column), number(end, column)
    if first >= last:
        raise RowError(column, "empty_span", f"the span from {first:g} to {last:g} seconds is empty")
    if last <= 0 or (duration is not None and first >= duration):
        raise RowError(column, "outside", f"{first:g} to {last:g} seconds lie outside the clip")
    return Event(text=label, start=max(0.0, first), end=last if duration is None else min(last, duration))
