"""Pixel budgets: how large a view of a picture may be, and the resizing that fits a picture into its budget.

Every view that a model sees passes through `fit`, and then through `policy.vision.patchify`. Training, both engines and serving
share them, so a view is the same array wherever it is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from pixelis.errors import BadInput

MAX_ASPECT = 200


@dataclass(frozen=True)
class PixelBudget:
    """How many pixels a view may have: at least `min_pixels`, at most `max_pixels`."""

    min_pixels: int
    max_pixels: int

    def __post_init__(self) -> None:
        if not 0 < self.min_pixels <= self.max_pixels:
            raise BadInput(f"pixel budget {self.min_pixels}..{self.max_pixels}: needs 0 < min_pixels <= max_pixels")


def fitted_size(height: int, width: int, budget: PixelBudget, multiple: int) -> tuple[int, int]:
    """Height and width of the view of a picture: multiples of `multiple`, area inside the budget, aspect nearly kept.

    Where Qwen's `smart_resize` already lands inside the budget the answer is the same. Where it would fall out (it rounds both
    sides down, so a 76 x 77 crop with a budget of 64 x 64 becomes 64 x 48), the closest aspect inside the budget is taken.
    Raises BadInput for empty pictures, for extreme aspects and for budgets that hold no multiple.
    """
    if height < 1 or width < 1:
        raise BadInput(f"a picture of {height} x {width} pixels has nothing to see")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise BadInput(f"a picture of {height} x {width} pixels is too thin: the longer side may be {MAX_ASPECT} times the other")
    if budget.max_pixels < multiple * multiple:
        raise BadInput(f"a budget of {budget.max_pixels} pixels holds no {multiple} x {multiple} tile")
    rows, columns = max(1, round(height / multiple)), max(1, round(width / multiple))
    tile = multiple * multiple
    if budget.min_pixels <= rows * columns * tile <= budget.max_pixels:
        return rows * multiple, columns * multiple
    bound = budget.max_pixels if rows * columns * tile > budget.max_pixels else budget.min_pixels
    scale = math.sqrt(bound / (height * width)) / multiple
    ideal = height * scale
    near = {max(1, math.floor(ideal)), math.ceil(ideal)}
    low, high = -(-budget.min_pixels // tile), budget.max_pixels // tile
    # Budgets of few tiles (nano's holds exactly 16) may have no fitting rectangle near the ideal one: then look at all.
    choices = _rectangles(near, low, high, height / width) or _rectangles(range(1, high + 1), low, high, height / width)
    if not choices:
        choices = _rectangles(near, 1, high, height / width) or [(0.0, 0, 1, 1)]
    _, _, rows, columns = min(choices)
    return rows * multiple, columns * multiple


def _rectangles(rows: Iterable[int], low: int, high: int, aspect: float) -> list[tuple[float, int, int, int]]:
    """Rectangles of `low` to `high` tiles, for each row count those of the best aspect: (skew, -tiles, rows, columns)."""
    result = []
    for r in rows:
        least, most = max(1, -(-low // r)), high // r
        for c in {min(max(round_(r / aspect), least), most) for round_ in (math.floor, math.ceil)}:
            if least <= c <= most:
                result.append((round(abs(math.log(r / c / aspect)), 6), -r * c, r, c))
    return result


def fit(image: np.ndarray, budget: PixelBudget, multiple: int) -> np.ndarray:
    """The view of a picture inside a pixel budget: uint8 [H, W, 3] -> uint8 [h, w, 3], antialiased.

    `multiple` is the model's patch size times its merge size. A picture that already fits is returned as it is. Raises BadInput.
    """
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise BadInput(f"expected a uint8 picture [height, width, 3], got {image.dtype} {list(image.shape)}")
    height, width = fitted_size(image.shape[0], image.shape[1], budget, multiple)
    if (height, width) == image.shape[:2]:
        return image
    # reducing_gap shrinks large pictures by whole-number means first: several times faster, the same to the eye.
    view = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0)
    return np.asarray(view)
