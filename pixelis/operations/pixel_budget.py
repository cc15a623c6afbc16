"""Pixel budgets: limits on the size of a view, and the resizing of a picture to its budget.

Training, both engines and serving share `fit`, so that a view is the same array everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import cv2
import numpy as np
from PIL import Image

from pixelis.config.dialogue import PixelRangeConfig
from pixelis.errors import BadInput

MAX_ASPECT = 200


@dataclass(frozen=True)
class PixelBudget:
    min_pixels: int
    max_pixels: int

    def __post_init__(self) -> None:
        if not 0 < self.min_pixels <= self.max_pixels:
            raise BadInput(
                f"pixel budget {self.min_pixels}..{self.max_pixels}: needs 0 < min_pixels <= max_pixels"
            )

    @classmethod
    def of(cls, settings: PixelRangeConfig) -> PixelBudget:
        return cls(settings.min_pixels, settings.max_pixels)


def fitted_size(height: int, width: int, budget: PixelBudget, multiple: int) -> tuple[int, int]:
    """Height and width of a view: multiples of ``multiple``, area inside the budget, closest aspect ratio.

    Equals Qwen's `smart_resize` where that result is inside the budget; it may leave it (a 76 x 77 crop with
    a budget of 64 x 64 becomes 64 x 48). Raises BadInput for empty or very thin pictures and budgets below
    one tile.
    """
    if height < 1 or width < 1:
        raise BadInput(f"a picture of {height} x {width} pixels has nothing to see")
    if max(height, width) > MAX_ASPECT * min(height, width):
        message = (
            f"a picture of {width} x {height} pixels is too thin: the longer side may be "
            f"{MAX_ASPECT} times the other"
        )
        raise BadInput(message, code="image_too_thin", fix="crop or pad the picture")
    if budget.max_pixels < multiple * multiple:
        message = f"a budget of {budget.max_pixels} pixels holds no {multiple} x {multiple} tile"
        raise BadInput(message, fix=f"set max_pixels of the budget in dialogue to at least {multiple**2}")
    rows, columns = max(1, round(height / multiple)), max(1, round(width / multiple))
    tile = multiple * multiple
    if budget.min_pixels <= rows * columns * tile <= budget.max_pixels:
        return rows * multiple, columns * multiple
    bound = budget.max_pixels if rows * columns * tile > budget.max_pixels else budget.min_pixels
    scale = math.sqrt(bound / (height * width)) / multiple
    ideal = height * scale
    candidates = {max(1, math.floor(ideal)), math.ceil(ideal)}
    low, high = -(-budget.min_pixels // tile), budget.max_pixels // tile
    # A budget of few tiles (nano's is exactly 16) may have no fitting rectangle near the ideal one: then try
    # all.
    choices = _rectangles(candidates, low, high, height / width) or _rectangles(
        range(1, high + 1), low, high, height / width
    )
    if not choices:
        choices = _rectangles(candidates, 1, high, height / width) or [(0.0, 0, 1, 1)]
    _, _, rows, columns = min(choices)
    return rows * multiple, columns * multiple


def _rectangles(rows: Iterable[int], low: int, high: int, aspect: float) -> list[tuple[float, int, int, int]]:
    """The best rectangles of `low` to `high` tiles for each row count: (skew, -tiles, rows, columns)."""
    result = []
    for r in rows:
        fewest, most = max(1, -(-low // r)), high // r
        for c in {min(max(rounding(r / aspect), fewest), most) for rounding in (math.floor, math.ceil)}:
            if fewest <= c <= most:
                result.append((round(abs(math.log(r / c / aspect)), 6), -r * c, r, c))
    return result


def fit(image: np.ndarray, budget: PixelBudget, multiple: int) -> np.ndarray:
    """Resize a picture to a pixel budget: uint8 [H, W, 3] -> uint8 [h, w, 3], antialiased.

    ``multiple`` is the model's patch size times its merge size. A picture that fits is returned unchanged.
    """
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise BadInput(f"expected a uint8 picture [height, width, 3], got {image.dtype} {list(image.shape)}")
    height, width = fitted_size(image.shape[0], image.shape[1], budget, multiple)
    if (height, width) == image.shape[:2]:
        return image
    # reducing_gap averages large pictures by whole numbers first: several times faster, with no visible
    # difference.
    view = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0)
    return np.asarray(view)


def shrink(picture: np.ndarray, longest: float) -> np.ndarray:
    """Scale uint8 [h, w] or [h, w, 3] down to at most ``longest`` pixels a side by averaging; never up."""
    height, width = picture.shape[:2]
    scale = longest / max(height, width)
    if scale >= 1:
        return np.ascontiguousarray(picture)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return cv2.resize(np.ascontiguousarray(picture), size, interpolation=cv2.INTER_AREA)
