"""Draws the results of operations: masks, boxes, text lines and tracks, with readable labels.

The data may come from a file: invalid entries are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pixelis.errors import OperationError
from pixelis.operations import masks
from pixelis.operations.geometry import WHOLE, as_box
from pixelis.records import Box

COLOURS = (
    (255, 45, 122),
    (0, 179, 255),
    (255, 183, 0),
    (57, 211, 83),
    (177, 128, 255),
    (255, 112, 67),
    (0, 216, 200),
    (215, 255, 62),
)
"""Bright enough for black letters, and distinct in hue."""

TINT = 0.4
MAX_LABEL = 48
MAX_DRAWN = 300

Colour = tuple[int, int, int]
Pixels = tuple[int, int, int, int]


def annotate(
    picture: np.ndarray,
    data: Mapping[str, Any],
    region: Box = WHOLE,
    frame: int | None = None,
    root: str | None = None,
) -> np.ndarray:
    """Draw the items of an observation's data on a copy of ``picture``, uint8 [h, w, 3], RGB.

    ``region``: what the picture shows, 0..1 of the whole picture or frame. ``frame``, ``root``: skip objects
    of other frames and media; tracks show their box in this frame, or their last one. Keys: ``objects``,
    ``lines``, ``tracks``; ``boxes`` and ``points``, plain or as ``{"box": ..., "label": ...}`` and
    ``{"point": ..., "label": ...}``; ``segments`` ``{"points": [...], "label": ...}``.
    """
    canvas = np.array(picture, dtype=np.uint8, order="C")
    pen = _Pen(canvas, region)
    objects = [
        (colour, item)
        for colour, item in _coloured(data.get("objects"))
        if item.get("kind") != "track" and _is_of(item, "root", root) and _is_of(item, "frame", frame)
    ]
    # All tints come before all lines, so that no mask dims the outline of its neighbour.
    tinted = [
        (colour, mask) for colour, item in objects if (mask := pen.tint(item.get("mask"), colour)) is not None
    ]
    for colour, mask in tinted:
        pen.outline(mask, colour)
    labels: list[tuple[Box, str, Colour]] = []
    for items, key in ((objects, "id"), (_coloured(data.get("boxes")), "label")):
        for colour, item in items:
            if (box := valid_box(item.get("box"))) is not None:
                pen.box(box, colour, thin=key == "id" and "mask" in item)
                labels.append((box, str(item.get(key, "")), colour))
    for colour, track in _coloured(data.get("tracks")):
        if _is_of(track, "root", root) and (box := _draw_track(pen, track, colour, frame)) is not None:
            labels.append((box, str(track.get("id", "")), colour))
    for colour, item in _coloured(data.get("segments")):
        if len(points := _points(item.get("points"))) > 1:
            pen.path(points, colour, dot=False)
            labels.append((pen.around(points[len(points) // 2]), str(item.get("label", "")), colour))
    for colour, item in _coloured(data.get("points"), "point"):
        for point in _points([item.get("point")]):
            pen.dot(point, colour)
            labels.append((pen.around(point), str(item.get("label", "")), colour))
    lines = [(line, box) for _, line in _coloured(data.get("lines")) if (box := valid_box(line.get("box")))]
    for _, box in lines:
        pen.box(box, COLOURS[1], thin=True)
        pen.occupied += [edges] if (edges := pen.pixels(box)) is not None else []
    # Labels come last: nothing is drawn over them.
    for box, text, colour in labels:
        pen.label(box, text, colour)
    for number, (line, box) in enumerate(lines, 1):
        pen.label(box, str(line.get("text", "")), COLOURS[1], fallback=str(number))
    return canvas


def caption(picture: np.ndarray, text: str) -> np.ndarray:
    """Draw a short text in the lower left corner of a copy of a picture (uint8 [h, w, 3])."""
    canvas = np.array(picture, dtype=np.uint8, order="C")
    pen = _Pen(canvas, WHOLE)
    if (patch := pen.patch(text, (235, 235, 235))) is not None:
        pen.paste(patch, 0, canvas.shape[0])
    return canvas


def valid_box(value: Any) -> Box | None:
    """Convert unchecked data to a box; None unless it is four finite numbers with an area."""
    try:
        box = as_box(value)
    except OperationError:
        return None
    return box if max(map(abs, box)) < 1e4 else None


def _points(value: Any) -> list[tuple[float, float]]:
    items = value[:MAX_DRAWN] if isinstance(value, (list, tuple)) else []
    boxes = [valid_box([*item, 1e3, 1e3]) for item in items if isinstance(item, (list, tuple))]
    return [box[:2] for box in boxes if box is not None]


def _coloured(items: Any, key: str = "box") -> Iterator[tuple[Colour, Mapping[str, Any]]]:
    """Valid items of one kind with their colours; a plain box (or point) becomes an item."""
    for number, item in enumerate(items[:MAX_DRAWN] if isinstance(items, (list, tuple)) else []):
        if isinstance(item, (list, tuple)):
            item = {key: item}
        if isinstance(item, Mapping):
            yield COLOURS[number % len(COLOURS)], item


def _is_of(item: Mapping[str, Any], key: str, value: object) -> bool:
    return value is None or item.get(key) in (None, value)


def _draw_track(pen: _Pen, track: Mapping[str, Any], colour: Colour, frame: int | None) -> Box | None:
    frames, boxes = track.get("frames"), track.get("boxes")
    if not isinstance(frames, (list, tuple)) or not isinstance(boxes, (list, tuple)):
        return None
    pairs = ((number, valid_box(value)) for number, value in zip(frames, boxes, strict=False))
    valid = [(number, box) for number, box in pairs if isinstance(number, int) and box is not None]
    if not valid:
        return None
    pen.path([((b[0] + b[2]) / 2, (b[1] + b[3]) / 2) for _, b in valid], colour)
    box = valid[-1][1] if frame is None else dict(valid).get(frame)
    if box is not None:
        pen.box(box, colour)
    return box


class _Pen:
    """Draws on a canvas in place; coordinates are 0..1 of the whole picture, of which it shows a region."""

    def __init__(self, canvas: np.ndarray, region: Box):
        self.canvas = canvas
        self.region = region
        self.height, self.width = canvas.shape[:2]
        side = math.sqrt(self.height * self.width)
        # In the small views of a small policy a line of two pixels would hide the object.
        self.line = max(1 if side < 160 else 2, round(side / 420))
        self.font = max(14, min(64, round(side / 52)))
        self.occupied: list[Pixels] = []

    def pixels(self, box: Box) -> Pixels | None:
        """Pixel edges of a box on the canvas; None when it is outside."""
        x0, y0, x1, y1 = self.region
        sx, sy = self.width / (x1 - x0), self.height / (y1 - y0)
        left, top = round((box[0] - x0) * sx), round((box[1] - y0) * sy)
        right, bottom = round((box[2] - x0) * sx), round((box[3] - y0) * sy)
        if left >= self.width or top >= self.height or right <= 0 or bottom <= 0:
            return None
        return left, top, max(right, left + 1), max(bottom, top + 1)

    def box(self, box: Box, colour: Colour, thin: bool = False) -> None:
        """Draw a frame around a box, coloured inside a dark line: visible on any background."""
        if (edges := self.pixels(box)) is None:
            return
        left, top, right, bottom = edges
        for i in range(max(1, self.line // 2) if thin else self.line):
            cv2.rectangle(self.canvas, (left - i, top - i), (right - 1 + i, bottom - 1 + i), colour, 1)
        cv2.rectangle(self.canvas, (left - i - 1, top - i - 1), (right + i, bottom + i), (0, 0, 0), 1)

    def around(self, point: tuple[float, float]) -> Box:
        x0, y0, x1, y1 = self.region
        reach = 2 * self.line + 2
        dx, dy = reach * (x1 - x0) / self.width, reach * (y1 - y0) / self.height
        return point[0] - dx, point[1] - dy, point[0] + dx, point[1] + dy

    def dot(self, point: tuple[float, float], colour: Colour) -> None:
        if (edges := self.pixels(self.around(point))) is not None:
            self.path([point], colour)
            self.occupied.append(edges)

    def path(self, points: Sequence[tuple[float, float]], colour: Colour, dot: bool = True) -> None:
        x0, y0, x1, y1 = self.region
        placed = [((x - x0) / (x1 - x0) * self.width, (y - y0) / (y1 - y0) * self.height) for x, y in points]
        line = np.clip(np.round(np.array(placed)), -30_000, 30_000).astype(np.int32).reshape(-1, 1, 2)
        cv2.polylines(self.canvas, [line], False, (0, 0, 0), self.line + 2, cv2.LINE_AA)
        cv2.polylines(self.canvas, [line], False, colour, self.line, cv2.LINE_AA)
        if dot:
            start = line[0, 0].tolist()
            cv2.circle(self.canvas, start, 2 * self.line + 2, (0, 0, 0), -1, cv2.LINE_AA)
            cv2.circle(self.canvas, start, 2 * self.line + 1, colour, -1, cv2.LINE_AA)

    def tint(self, code: Any, colour: Colour) -> tuple[np.ndarray, int, int] | None:
        """Tint a mask of the whole picture; returns its part (uint8 [h, w], left, top), or None."""
        try:
            decoded = masks.decode(code)
        except OperationError:
            return None
        if (edges := self.pixels(decoded.box)) is None:
            return None
        left, top, right, bottom = np.clip(edges, 0, (self.width, self.height) * 2).tolist()
        # One affine map crops and scales: the region may start between two pixels of the mask.
        x0, y0, x1, y1 = self.region
        sx, sy = (x1 - x0) * decoded.width / self.width, (y1 - y0) * decoded.height / self.height
        shift_x = x0 * decoded.width + (left + 0.5) * sx - 0.5 - decoded.left
        shift_y = y0 * decoded.height + (top + 0.5) * sy - 0.5 - decoded.top
        mask = cv2.warpAffine(
            decoded.inside.astype(np.uint8),
            np.array([[sx, 0, shift_x], [0, sy, shift_y]]),
            (right - left, bottom - top),
            flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP,
        )
        part = self.canvas[top:bottom, left:right]
        cv2.copyTo(cv2.addWeighted(part, 1 - TINT, np.full_like(part, colour), TINT, 0), mask, part)
        return mask, left, top

    def outline(self, placed: tuple[np.ndarray, int, int], colour: Colour) -> None:
        mask, left, top = placed
        contours, _ = cv2.findContours(mask, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE, offset=(left, top))
        if self.line > 1:
            cv2.drawContours(self.canvas, contours, -1, (0, 0, 0), self.line + 2)
        cv2.drawContours(self.canvas, contours, -1, colour, self.line)

    def label(self, box: Box, text: str, colour: Colour, fallback: str | None = None) -> None:
        """Draw a text beside a box where it covers neither text nor another label, else at its corner.

        ``fallback`` replaces a text without room, or with letters that the font lacks.
        """
        if not text or (edges := self.pixels(box)) is None:
            return
        left, top, right, bottom = edges
        # Pillow's default font has Latin letters and a few symbols.
        drawable = all(character < "\u0180" or character in "–—‘’“”…€™•" for character in text)
        if drawable and (patch := self.patch(text, colour)) is not None:
            height, width = patch.shape[:2]
            start = min(max(left, 0), max(0, self.width - width))
            for x, y in ((start, top - height), (start, bottom), (right, top), (left - width, top)):
                inside = x >= 0 and y >= 0 and x + width <= self.width and y + height <= self.height
                if inside and all(
                    x >= x1 or x + width <= x0 or y >= y1 or y + height <= y0
                    for x0, y0, x1, y1 in self.occupied
                ):
                    self.paste(patch, x, y)
                    return
        if (patch := self.patch(fallback or text, colour)) is not None:
            height, width = patch.shape[:2]
            self.paste(patch, *((left - width, top - height // 2) if fallback else (left, top)))

    def patch(self, text: str, colour: Colour) -> np.ndarray | None:
        """A label, uint8 [h, w, 3], truncated to the canvas; None when the canvas is too small."""
        text = " ".join(text.split())
        text = text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"
        while (patch := _patch(text, self.font, colour)).shape[1] > self.width and len(text) > 3:
            text = text[: max(2, min(len(text) - 2, len(text) * self.width // patch.shape[1]))] + "…"
        return patch if patch.shape[0] <= self.height and patch.shape[1] <= self.width else None

    def paste(self, patch: np.ndarray, left: int, top: int) -> None:
        height, width = patch.shape[:2]
        left, top = min(max(left, 0), self.width - width), min(max(top, 0), self.height - height)
        self.canvas[top : top + height, left : left + width] = patch
        self.occupied.append((left, top, left + width, top + height))


@lru_cache(maxsize=1024)
def _patch(text: str, size: int, colour: Colour) -> np.ndarray:
    font: Any = ImageFont.load_default(size)
    pad = max(2, size // 5)
    left, _, right, _ = font.getbbox(text)
    ascent, descent = font.getmetrics()
    image = Image.new("RGB", (int(right - left) + 2 * pad, ascent + descent + pad), colour)
    ImageDraw.Draw(image).text((pad - left, pad // 2), text, font=font, fill=(0, 0, 0))
    array = np.asarray(image)
    array.setflags(write=False)
    return array
