"""ENHANCE: show a region with more contrast, brighter, sharper or with less noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import cv2
import numpy as np
from pydantic import Field

from pixelis.operations.geometry import WHOLE, clamp
from pixelis.operations.operation import (
    BoxArgument,
    Operation,
    OperationArguments,
    Result,
    Scene,
    Target,
    View,
)

Method = Literal["contrast", "brighten", "sharpen", "denoise"]

CLIP_LIMIT, TILES = 2.0, 8
MAX_GAMMA = 4.0
_LAPLACIANS = np.array([[1, -2, 1], [-2, 4, -2], [1, -2, 1]], np.float32)
"""The difference of two Laplacians, which is zero on edges and slopes."""


class EnhanceArguments(OperationArguments):
    method: Method = Field(
        description=(
            "contrast (evens out light and shade), brighten (for dark regions), sharpen (edges) or "
            "denoise (grain)"
        )
    )
    box: BoxArgument | None = Field(None, description="the region to show, default all of the image")


class Enhance(Operation):
    """Changes values, never places; small regions are enlarged to the crop budget."""

    name = "enhance"
    description = (
        "Show an image, or a region of it, with more contrast, brighter, sharper or with less noise, "
        "to see what is faint, dark, blurred or grainy."
    )
    Arguments = EnhanceArguments
    quick = True

    @classmethod
    def run(cls, arguments: EnhanceArguments, target: Target, scene: Scene) -> Result:
        """One view, and the mean and spread of its brightness before and after, 0..255."""
        box = clamp(arguments.box or WHOLE)
        region, method = target.crop(box), METHODS[arguments.method]
        plain = scene.fit_crop(region)
        # Enlarging makes noise look like detail, so small regions are improved first; but sharpening is for
        # the shown pixels.
        if plain.size > region.size and arguments.method != "sharpen":
            view = scene.fit_crop(method(np.ascontiguousarray(region)))
        else:
            view = method(np.ascontiguousarray(plain))
        before, after = _brightness(plain), _brightness(view)
        text = (
            f"{arguments.method}: brightness {before[0]:.0f} -> {after[0]:.0f}, "
            f"its spread {before[1]:.0f} -> {after[1]:.0f} (of 0..255)"
        )
        names = ("mean_before", "spread_before", "mean_after", "spread_after")
        data = {"method": arguments.method, **dict(zip(names, (*before, *after), strict=True))}
        return Result(text, [View(view, box)], data)


def contrast(pixels: np.ndarray) -> np.ndarray:
    """Equalise the lightness of each neighbourhood, with limited gain (CLAHE, Zuiderveld 1994)."""
    lab = cv2.cvtColor(pixels, cv2.COLOR_RGB2LAB)
    lab[..., 0] = cv2.createCLAHE(CLIP_LIMIT, (TILES, TILES)).apply(np.ascontiguousarray(lab[..., 0]))
    return cv2.cvtColor(lab, cv2.COLOR_LAB2RGB)


def brighten(pixels: np.ndarray) -> np.ndarray:
    """Raise dark values by the gamma that moves the median brightness to the middle; never darker."""
    median = min(max(float(np.median(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY))) / 255, 1 / 255), 0.5)
    gamma = min(math.log(median) / math.log(0.5), MAX_GAMMA)
    curve = np.round(255 * (np.arange(256) / 255) ** (1 / gamma)).astype(np.uint8)
    return cv2.LUT(pixels, curve)


def sharpen(pixels: np.ndarray) -> np.ndarray:
    """Unsharp masking: add the difference from a blurred copy (sigma 1.5 pixels)."""
    return cv2.addWeighted(pixels, 2.0, cv2.GaussianBlur(pixels, (0, 0), 1.5), -1.0, 0)


def denoise(pixels: np.ndarray) -> np.ndarray:
    """Bilateral filter (Tomasi and Manduchi, 1998) with four times the measured noise as its colour sigma."""
    return cv2.bilateralFilter(pixels, 7, min(max(4 * noise(pixels), 4.0), 120.0), 2.0)


def noise(pixels: np.ndarray) -> float:
    """The standard deviation of the noise, 0..255, mean of the channels (Immerkaer, 1996)."""
    second = cv2.filter2D(pixels.astype(np.float32), -1, _LAPLACIANS)
    return math.sqrt(math.pi / 2) / 6 * float(np.abs(second).mean())


METHODS: dict[Method, Callable[[np.ndarray], np.ndarray]] = {
    "contrast": contrast,
    "brighten": brighten,
    "sharpen": sharpen,
    "denoise": denoise,
}


def _brightness(pixels: np.ndarray) -> tuple[float, float]:
    mean, spread = cv2.meanStdDev(cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2GRAY))
    return round(float(mean[0, 0]), 2), round(float(spread[0, 0]), 2)
