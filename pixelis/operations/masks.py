"""Object masks: boolean windows of the object's size, and COCO run lengths over the whole picture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import cv2
import numpy as np
from pycocotools import mask as coco
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from pixelis.errors import OperationError
from pixelis.records import Box

MAX_PIXELS = 200_000_000
MAX_COUNTS = 4_000_000

Count = Annotated[int, Field(ge=0, le=MAX_PIXELS)]
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
    def edges(self) -> Edges:
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
        code = coco.encode(np.asfortranarray(self.full().view(np.uint8)))
        return {"size": [self.height, self.width], "counts": code["counts"].decode()}


@dataclass(frozen=True)
class Segment:
    """A segmented object: its mask, the method's confidence 0..1, and the method's name."""

    mask: Mask
    score: float
    method: str


class _Code(BaseModel):
    model_config = ConfigDict(strict=True)

    size: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
    counts: str | list[Count]


def encode(inside: np.ndarray) -> dict[str, Any]:
    """`Mask.encode` of a bool [height, width] mask. Raises OperationError ``nothing_found``."""
    return Mask.of(inside).encode()


def decode(code: Any, height: int | None = None, width: int | None = None) -> Mask:
    """Decode an untrusted COCO code, a string or a list, validated before memory is allocated.

    ``height``, ``width``: the expected picture size. Raises OperationError ``bad_arguments``, ``limit``,
    ``nothing_found``.
    """
    try:
        checked = _Code.model_validate(code)
    except ValidationError:
        message = 'a mask is {"size": [height, width], "counts": a string or whole numbers}'
        raise OperationError(message, code="bad_arguments") from None
    rows, columns = checked.size
    if rows * columns > MAX_PIXELS or len(checked.counts) > MAX_COUNTS:
        raise OperationError(f"a mask has at most {MAX_PIXELS} pixels and {MAX_COUNTS} counts", code="limit")
    if height is not None and width is not None and (rows, columns) != (height, width):
        message = f"the mask is {rows}x{columns} (height x width), the picture {height}x{width}"
        raise OperationError(message, code="bad_arguments")
    counts = (
        _unpack(checked.counts) if isinstance(checked.counts, str) else np.array(checked.counts, np.int64)
    )
    # Each count is checked before the sum, which could overflow.
    if not counts.size or counts.min() < 0 or counts.max() > rows * columns or counts.sum() != rows * columns:
        raise OperationError(
            f"the mask's counts do not add up to {rows}x{columns} pixels", code="bad_arguments"
        )
    if not counts[1::2].any():
        raise OperationError("the mask is empty", code="nothing_found")
    # Empty columns on either side take no memory.
    left, right = int(counts[0]) // rows, int(counts[-1]) // rows if counts.size % 2 else 0
    counts[0] -= left * rows
    counts[-1] -= right * rows
    inside = np.repeat(np.arange(counts.size) % 2 == 1, counts).reshape(-1, rows).T
    return Mask.of(inside, left, 0, rows, columns)


def _unpack(code: str) -> np.ndarray:
    """Run lengths of COCO's string, which pycocotools would trust and read past its end.

    5 bits a character, lowest first; 0x20: more follow; from the third run on, differences to two runs
    before.
    """
    broken = OperationError("the mask's counts are no COCO run-length string", code="bad_arguments")
    if not code.isascii():
        raise broken
    digits = np.frombuffer(code.encode(), np.uint8).astype(np.int64) - 48
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
