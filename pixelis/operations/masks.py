"""Object masks: boolean windows of the object's size, and COCO run lengths over the whole picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import cv2
import numpy as np
from pycocotools import mask as coco

from pixelis.errors import OperationError
from pixelis.records import Box

MAX_PIXELS = 200_000_000
"""Largest picture size that a mask may declare."""
MAX_COUNTS = 4_000_000
"""Longest code of a mask, in characters or list entries."""

Edges = tuple[int, int, int, int]
"""Left, top, right and bottom of a region in pixels of the picture."""


@dataclass(frozen=True)
class Mask:
    """A mask over a picture of ``height`` x ``width``: bool ``inside`` is its window at ``left``, ``top``."""

    inside: np.ndarray
    left: int
    top: int
    height: int
    width: int

    @classmethod
    def of(
        cls,
        inside: np.ndarray,
        left: int = 0,
        top: int = 0,
        height: int | None = None,
        width: int | None = None,
    ) -> Mask:
        """Crop bool [h, w] at ``left``, ``top`` of the picture to the window of its true pixels.

        Raises OperationError ``nothing_found`` for an empty mask.
        """
        height, width = height or top + inside.shape[0], width or left + inside.shape[1]
        x, y, w, h = cv2.boundingRect(inside.astype(np.uint8))
        if not (w and h):
            raise OperationError("the mask is empty", code="nothing_found")
        return cls(inside[y : y + h, x : x + w].astype(bool), left + x, top + y, height, width)

    @cached_property
    def area(self) -> int:
        return int(np.count_nonzero(self.inside))

    @property
    def edges(self) -> tuple[int, int, int, int]:
        return self.left, self.top, self.left + self.inside.shape[1], self.top + self.inside.shape[0]

    @property
    def box(self) -> Box:
        """The bounding box, 0..1 of the picture."""
        left, top, right, bottom = self.edges
        return left / self.width, top / self.height, right / self.width, bottom / self.height

    def full(self) -> np.ndarray:
        """bool [height, width] over the whole picture."""
        full = np.zeros((self.height, self.width), bool)
        left, top, right, bottom = self.edges
        full[top:bottom, left:right] = self.inside
        return full

    def encode(self) -> dict[str, Any]:
        """COCO's compressed run lengths: {"size": [height, width], "counts": str}."""
        full = np.zeros((self.height, self.width), np.uint8, order="F")
        left, top, right, bottom = self.edges
        full[top:bottom, left:right] = self.inside
        code = coco.encode(full)
        return {"size": [self.height, self.width], "counts": code["counts"].decode()}


@dataclass(frozen=True)
class Segment:
    """A segmented object: its mask, the method's confidence 0..1, and the method's name."""

    mask: Mask
    score: float
    method: str


def encode(inside: np.ndarray) -> dict[str, Any]:
    """`Mask.encode` of a bool [height, width] mask. Raises OperationError ``nothing_found``."""
    return Mask.of(inside).encode()


def decode(code: Any, height: int | None = None, width: int | None = None) -> Mask:
    """Decode an untrusted COCO code, a string or a list, validated before memory is allocated.

    ``height``, ``width``: the expected picture size. Raises OperationError ``bad_arguments``, ``limit``,
    ``nothing_found``.
    """
    if not isinstance(code, Mapping) or not {"size", "counts"} <= set(code):
        raise OperationError('a mask is {"size": [height, width], "counts": ...}', code="bad_arguments")
    size, counts = code["size"], code["counts"]
    if (
        not isinstance(size, (list, tuple))
        or len(size) != 2
        or any(type(n) is not int or n < 1 for n in size)
    ):
        raise OperationError("the mask's size is two whole numbers height, width", code="bad_arguments")
    if size[0] * size[1] > MAX_PIXELS:
        raise OperationError(f"the mask covers more than {MAX_PIXELS} pixels", code="limit")
    if height is not None and width is not None and tuple(size) != (height, width):
        message = f"the mask is {size[0]}x{size[1]} (height x width), the picture {height}x{width}"
        raise OperationError(message, code="bad_arguments")
    height, width = size
    if not isinstance(counts, (str, bytes, list, tuple)):
        raise OperationError(
            "the mask's counts are a string or a list of whole numbers", code="bad_arguments"
        )
    if len(counts) > MAX_COUNTS:
        raise OperationError(f"the mask's counts are longer than {MAX_COUNTS}", code="limit")
    if isinstance(counts, (str, bytes)):
        counts = _unpack(counts)
    elif all(type(n) is int and 0 <= n <= MAX_PIXELS for n in counts):
        counts = np.asarray(counts, np.int64)
    else:
        raise OperationError("the mask's counts are whole numbers from 0", code="bad_arguments")
    # Each count is checked before the sum, which could overflow.
    if (counts.size and (counts.min() < 0 or counts.max() > height * width)) or int(
        counts.sum()
    ) != height * width:
        raise OperationError(
            f"the mask's counts do not add up to {height}x{width} pixels", code="bad_arguments"
        )
    ends = np.cumsum(counts)
    inside = counts[1::2] > 0
    starts, ends = ends[0 : 2 * inside.size : 2][inside], ends[1::2][inside]
    if not starts.size:
        raise OperationError("the mask is empty", code="nothing_found")
    first, last = starts // height, (ends - 1) // height
    left, right = int(first[0]), int(last[-1]) + 1
    if (first != last).any():  # a run continues from one column to the next
        top, bottom = 0, height
    else:
        top, bottom = int((starts % height).min()), int(((ends - 1) % height).max()) + 1
    # +1 at each start and -1 at each end; the cumulative sum down the window's columns is the mask.
    steps = np.zeros((right - left) * height + 1, np.int8)
    steps[starts - left * height] += 1
    steps[ends - left * height] -= 1
    columns = np.cumsum(steps[:-1], dtype=np.int8).reshape(right - left, height).T
    return Mask.of(columns[top:bottom] > 0, left, top, height, width)


def _unpack(code: str | bytes) -> np.ndarray:
    """Run lengths of COCO's string, which pycocotools would trust and read past its end.

    5 bits a character, lowest first; 0x20: more follow; from the third run on, differences to two runs
    before.
    """
    broken = OperationError("the mask's counts are no COCO run-length string", code="bad_arguments")
    try:
        text = code.encode("ascii") if isinstance(code, str) else code
    except UnicodeEncodeError:
        raise broken from None
    digits = np.frombuffer(text, np.uint8).astype(np.int64) - 48
    if not digits.size:
        return np.zeros(0, np.int64)
    last = (digits & 0x20) == 0
    if digits.min() < 0 or digits.max() > 63 or not last[-1]:
        raise broken
    starts = np.append(0, np.flatnonzero(last)[:-1] + 1)
    lengths = np.diff(np.append(starts, digits.size))
    if lengths.max() > 7:
        raise broken
    shifts = 5 * (np.arange(digits.size) - np.repeat(starts, lengths))
    values = np.add.reduceat((digits & 0x1F) << shifts, starts)
    negative = (digits[last] & 0x10) != 0
    values -= np.where(negative, np.int64(1) << (5 * lengths), 0)
    values[1::2] = np.cumsum(values[1::2])
    values[2::2] = np.cumsum(values[2::2])
    return values
