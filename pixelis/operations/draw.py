"""Drawing what an operation found onto pixels: masks, boxes, read lines and tracks, with labels that are readable on any ground.

Pure functions of pixels and of an observation's ``data``. The data may come from a file: entries that make no sense are left out.
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
from pixelis.operations.geometry import WHOLE
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
"""Bright enough for black letters, far enough apart in hue to be told apart side by side."""

TINT = 0.4
MAX_LABEL = 48
MAX_DRAWN = 300
"""Things drawn of one kind: a page of text has fewer lines."""

Pixels = tuple[int, int, int, int]


def annotate(
    picture: np.ndarray, data: Mapping[str, Any], region: Box = WHOLE, frame: int | None = None, root: str | None = None
) -> np.ndarray:
    """A copy of ``picture`` with the objects, boxes, lines and tracks of an observation's data on it.

    ``picture``: uint8 [h, w, 3], RGB, which shows ``region`` (0..1) of the whole picture or frame at any resolution. ``frame``:
    its number in a clip; objects of other frames are left out, tracks show their box there, or their last one without a number.
    ``root``: the media it shows; objects and tracks of others are left out. ``data["boxes"]`` holds further places: boxes, or
    ``{"box": ..., "label": ...}``.
    """
    canvas = np.array(picture, dtype=np.uint8, order="C")
    pen = _Pen(canvas, region)
    here = [
        (colour, thing) for colour, thing in _coloured(data.get("objects")) if _belongs(thing, root) and _on_frame(thing, frame)
    ]
    things = [(colour, thing) for colour, thing in here if thing.get("kind") != "track"]
    # All tints come before all lines, so that no mask dims the outline of its neighbour.
    tinted = [(colour, mask) for colour, thing in things if (mask := pen.tint(thing.get("mask"), colour)) is not None]
    for colour, mask in tinted:
        pen.outline(mask, colour)
    for colour, thing in things:
        if (box := as_place(thing.get("box"))) is not None:
            pen.box(box, colour, thin="mask" in thing)
    for colour, thing in _coloured(data.get("boxes")):
        if (box := as_place(thing.get("box"))) is not None:
            pen.box(box, colour)
    tracks = [(colour, track) for colour, track in _coloured(data.get("tracks")) if _belongs(track, root)]
    labels = [_draw_track(pen, track, colour, frame) for colour, track in tracks]
    lines = [(colour, line, box) for colour, line in _coloured(data.get("lines")) if (box := as_place(line.get("box")))]
    for _, _, box in lines:
        pen.box(box, COLOURS[1], thin=True)
        pen.keep_free(box)
    # Labels come last: nothing is drawn over them.
    for colour, thing in things:
        pen.label(as_place(thing.get("box")), str(thing.get("id", "")), colour)
    for colour, thing in _coloured(data.get("boxes")):
        pen.label(as_place(thing.get("box")), str(thing.get("label", "")), colour)
    for (colour, _), (box, name) in zip(tracks, labels, strict=True):
        pen.label(box, name, colour)
    for number, (_, line, box) in enumerate(lines, 1):
        pen.label(box, str(line.get("text", "")), COLOURS[1], instead=str(number))
    return canvas


def caption(picture: np.ndarray, said: str) -> np.ndarray:
    """A copy of a picture (uint8 [h, w, 3]) with a short text in its lower left corner, for example a frame's number."""
    canvas = np.array(picture, dtype=np.uint8, order="C")
    pen = _Pen(canvas, WHOLE)
    patch = pen.patch(said, (235, 235, 235))
    if patch is not None:
        pen.paste(patch, 0, max(0, canvas.shape[0] - patch.shape[0]))
    return canvas


def contact_sheet(pictures: Sequence[np.ndarray], columns: int = 4, width: int = 1600) -> np.ndarray:
    """Pictures of any sizes (uint8 [h, w, 3]) side by side in rows on a dark ground, uint8 [h, ``width``, 3] or narrower."""
    gap = 6
    columns = max(1, min(columns, len(pictures)))
    cell = min((width - gap * (columns + 1)) // columns, max(p.shape[1] for p in pictures))
    scaled = []
    for picture in pictures:
        height = max(1, round(picture.shape[0] * cell / picture.shape[1]))
        way = cv2.INTER_AREA if cell < picture.shape[1] else cv2.INTER_CUBIC
        scaled.append(cv2.resize(np.ascontiguousarray(picture), (cell, height), interpolation=way))
    rows = [scaled[i : i + columns] for i in range(0, len(scaled), columns)]
    heights = [max(p.shape[0] for p in row) for row in rows]
    sheet = np.full((sum(heights) + gap * (len(rows) + 1), columns * (cell + gap) + gap, 3), 24, np.uint8)
    top = gap
    for row, height in zip(rows, heights, strict=True):
        for place, picture in enumerate(row):
            left = gap + place * (cell + gap)
            sheet[top : top + picture.shape[0], left : left + cell] = picture
        top += height + gap
    return sheet


def shrink(picture: np.ndarray, longest: int) -> np.ndarray:
    """The picture (uint8 [h, w, 3]) with its longer side at most ``longest``; itself when it already is."""
    height, width = picture.shape[:2]
    scale = longest / max(height, width)
    if scale >= 1:
        return picture
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return cv2.resize(np.ascontiguousarray(picture), size, interpolation=cv2.INTER_AREA)


def as_place(value: Any) -> Box | None:
    """A box of finite numbers with an area, or None for anything else: for data that nobody checked."""
    if not isinstance(value, (list, tuple)) or len(value) != 4:
        return None
    try:
        x0, y0, x1, y1 = (float(v) for v in value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not all(math.isfinite(v) and abs(v) < 1e4 for v in (x0, y0, x1, y1)) or x0 >= x1 or y0 >= y1:
        return None
    return x0, y0, x1, y1


def _coloured(things: Any) -> Iterator[tuple[tuple[int, int, int], Mapping[str, Any]]]:
    """The things of one kind, each with its colour; a bare box counts as a thing."""
    for number, thing in enumerate(things[:MAX_DRAWN] if isinstance(things, (list, tuple)) else []):
        if isinstance(thing, (list, tuple)):
            thing = {"box": thing}
        if isinstance(thing, Mapping):
            yield COLOURS[number % len(COLOURS)], thing


def _belongs(thing: Mapping[str, Any], root: str | None) -> bool:
    return root is None or thing.get("root") in (None, root)


def _on_frame(thing: Mapping[str, Any], frame: int | None) -> bool:
    return frame is None or thing.get("frame") in (None, frame)


def _draw_track(pen: _Pen, track: Mapping[str, Any], colour: tuple[int, int, int], frame: int | None) -> tuple[Box | None, str]:
    """Draw the way of the centres and the box on this frame; returns the box and what its label says."""
    frames, boxes = track.get("frames"), track.get("boxes")
    if not isinstance(frames, (list, tuple)) or not isinstance(boxes, (list, tuple)):
        return None, ""
    pairs = ((number, as_place(value)) for number, value in zip(frames, boxes, strict=False))
    known = [(number, box) for number, box in pairs if isinstance(number, int) and box is not None]
    if not known:
        return None, ""
    pen.path([((b[0] + b[2]) / 2, (b[1] + b[3]) / 2) for _, b in known], colour)
    box = known[-1][1] if frame is None else dict(known).get(frame)
    if box is not None:
        pen.box(box, colour)
    return box, str(track.get("id", ""))


class _Pen:
    """Draws on a canvas in place. Places are 0..1 of the whole picture, of which the canvas shows a region."""

    def __init__(self, canvas: np.ndarray, region: Box):
        self.canvas = canvas
        self.region = region
        self.height, self.width = canvas.shape[:2]
        side = math.sqrt(self.height * self.width)
        # In the small views of a small policy two pixels would hide what they show.
        self.line = max(1 if side < 160 else 2, round(side / 420))
        self.font = max(14, min(64, round(side / 52)))
        self.taken: list[Pixels] = []

    def pixels(self, box: Box) -> Pixels | None:
        """Pixel edges of a box on the canvas, None when it lies beside it."""
        x0, y0, x1, y1 = self.region
        sx, sy = self.width / (x1 - x0), self.height / (y1 - y0)
        left, top = round((box[0] - x0) * sx), round((box[1] - y0) * sy)
        right, bottom = round((box[2] - x0) * sx), round((box[3] - y0) * sy)
        if left >= self.width or top >= self.height or right <= 0 or bottom <= 0:
            return None
        return left, top, max(right, left + 1), max(bottom, top + 1)

    def box(self, box: Box, colour: tuple[int, int, int], thin: bool = False) -> None:
        """A frame around a box, which covers none of it: the colour within a dark line, so that it shows on light and on dark."""
        if (edges := self.pixels(box)) is None:
            return
        left, top, right, bottom = edges
        for i in range(max(1, self.line // 2) if thin else self.line):
            cv2.rectangle(self.canvas, (left - i, top - i), (right - 1 + i, bottom - 1 + i), colour, 1)
        cv2.rectangle(self.canvas, (left - i - 1, top - i - 1), (right + i, bottom + i), (0, 0, 0), 1)

    def path(self, points: Sequence[tuple[float, float]], colour: tuple[int, int, int]) -> None:
        """A line through points with a dot at its start."""
        x0, y0, x1, y1 = self.region
        placed = [((x - x0) / (x1 - x0) * self.width, (y - y0) / (y1 - y0) * self.height) for x, y in points]
        way = np.clip(np.round(np.array(placed)), -30_000, 30_000).astype(np.int32).reshape(-1, 1, 2)
        cv2.polylines(self.canvas, [way], False, (0, 0, 0), self.line + 2, cv2.LINE_AA)
        cv2.polylines(self.canvas, [way], False, colour, self.line, cv2.LINE_AA)
        start = (int(way[0, 0, 0]), int(way[0, 0, 1]))
        cv2.circle(self.canvas, start, 2 * self.line + 2, (0, 0, 0), -1, cv2.LINE_AA)
        cv2.circle(self.canvas, start, 2 * self.line + 1, colour, -1, cv2.LINE_AA)

    def tint(self, code: Any, colour: tuple[int, int, int]) -> tuple[np.ndarray, int, int] | None:
        """Tint a mask of the whole picture; returns its part on the canvas as (uint8 [h, w], left, top), None without one."""
        if code is None:
            return None
        try:
            found = masks.decode(code)
        except OperationError:
            return None
        edges = self.pixels(found.box)
        if edges is None:
            return None
        left, top, right, bottom = max(edges[0], 0), max(edges[1], 0), min(edges[2], self.width), min(edges[3], self.height)
        # One map for crop and scale: the region may start between two pixels of the mask.
        x0, y0, x1, y1 = self.region
        sx, sy = (x1 - x0) * found.width / self.width, (y1 - y0) * found.height / self.height
        shift_x = x0 * found.width + (left + 0.5) * sx - 0.5 - found.left
        shift_y = y0 * found.height + (top + 0.5) * sy - 0.5 - found.top
        mask: np.ndarray = found.inside.view(np.uint8)
        if (sx, sy) != (1, 1) or (right - left, bottom - top) != mask.shape[::-1]:
            way = np.array([[sx, 0, shift_x], [0, sy, shift_y]])
            mask = cv2.warpAffine(mask, way, (right - left, bottom - top), flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP)
        mask = np.ascontiguousarray(mask)
        part = self.canvas[top:bottom, left:right]
        cv2.copyTo(cv2.addWeighted(part, 1 - TINT, np.full_like(part, colour), TINT, 0), mask, part)
        return mask, left, top

    def outline(self, found: tuple[np.ndarray, int, int], colour: tuple[int, int, int]) -> None:
        """The border of a mask."""
        mask, left, top = found
        contours, _ = cv2.findContours(mask, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE, offset=(left, top))
        if self.line > 1:
            cv2.drawContours(self.canvas, contours, -1, (0, 0, 0), self.line + 2)
        cv2.drawContours(self.canvas, contours, -1, colour, self.line)

    def keep_free(self, box: Box) -> None:
        """Labels should not cover this place."""
        if (edges := self.pixels(box)) is not None:
            self.taken.append(edges)

    def label(self, box: Box | None, said: str, colour: tuple[int, int, int], instead: str | None = None) -> None:
        """A text beside a box, where it covers neither a text nor another label.

        Where there is no such place, or the font lacks its letters, ``instead`` stands at the corner (by default the text).
        """
        if box is None or not said or (edges := self.pixels(box)) is None:
            return
        if _drawable(said) and (patch := self.patch(said, colour)) is not None and self._beside(edges, patch):
            return
        patch = self.patch(said if instead is None else instead, colour)
        if patch is not None:
            top = edges[1] - patch.shape[0] // 2 if instead is not None else edges[1]
            left = edges[0] - patch.shape[1] if instead is not None else edges[0]
            self.paste(patch, left, top)

    def _beside(self, edges: Pixels, patch: np.ndarray) -> bool:
        height, width = patch.shape[:2]
        left, top, right, bottom = edges
        start = min(max(left, 0), max(0, self.width - width))
        for x, y in ((start, top - height), (start, bottom), (right, top), (left - width, top), (start, top)):
            spot = (x, y, x + width, y + height)
            if x < 0 or y < 0 or spot[2] > self.width or spot[3] > self.height:
                continue
            if not any(_meet(spot, other) for other in self.taken):
                self.paste(patch, x, y)
                return True
        return False

    def patch(self, said: str, colour: tuple[int, int, int]) -> np.ndarray | None:
        """A label, uint8 [h, w, 3]: black letters on the colour, cut to what the canvas can hold."""
        said = " ".join(said.split())
        said = said if len(said) <= MAX_LABEL else said[: MAX_LABEL - 1] + "…"
        while (patch := _patch(said, self.font, colour)).shape[1] > self.width and len(said) > 3:
            said = said[: max(2, min(len(said) - 2, len(said) * self.width // patch.shape[1]))] + "…"
        return patch if patch.shape[0] <= self.height and patch.shape[1] <= self.width else None

    def paste(self, patch: np.ndarray, left: int, top: int) -> None:
        """Put a label on the canvas, moved inside."""
        height, width = patch.shape[:2]
        left, top = min(max(left, 0), self.width - width), min(max(top, 0), self.height - height)
        self.canvas[top : top + height, left : left + width] = patch
        self.taken.append((left, top, left + width, top + height))


def _meet(one: Pixels, other: Pixels) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _drawable(said: str) -> bool:
    """True when Pillow's font has the letters: it holds Latin and a few signs."""
    return all(character < "\u0180" or character in "–—‘’“”…€™•" for character in said)


@lru_cache(maxsize=16)
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


@lru_cache(maxsize=1024)
def _patch(said: str, size: int, colour: tuple[int, int, int]) -> np.ndarray:
    font, pad = _font(size), max(2, size // 5)
    left, _, right, _ = font.getbbox(said)
    ascent, descent = font.getmetrics()
    image = Image.new("RGB", (int(right - left) + 2 * pad, ascent + descent + pad), colour)
    ImageDraw.Draw(image).text((pad - left, pad // 2), said, font=font, fill=(0, 0, 0))
    array = np.asarray(image)
    array.setflags(write=False)
    return array
