"""The fifteen corruptions of ImageNet-C, and occlusion: ``cards:?split=test&corruption=fog&severity=3``.

Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations"
(ICLR 2019), with parameters for pictures of 224 pixels, unscaled. Glass blur moves all pixels at once, frost
is drawn instead of photographed. Annotations stay those of the clean picture.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from pixelis.datasets.source_options import suggest, whole_option
from pixelis.errors import BadInput

Pixels = Float[np.ndarray, "height width 3"]
"""Values 0..1."""
SEVERITIES = (1, 2, 3, 4, 5)
SIDE = 244
"""Length that the published displacements of `elastic_transform` are parts of."""


class Corruption(NamedTuple):
    """A kind of corruption and its severity, 1..5."""

    kind: str
    severity: int

    def apply(
        self, picture: UInt8[np.ndarray, "height width 3"], rng: np.random.Generator
    ) -> UInt8[np.ndarray, "height width 3"]:
        kind, parameters = KINDS[self.kind]
        result = kind(picture.astype(np.float32) / 255, parameters[self.severity - 1], rng)
        return (np.clip(result, 0, 1) * 255).astype(np.uint8)


def corruption_of(source: str, options: Mapping[str, str]) -> Corruption | None:
    if not (kind := options.get("corruption", "")):
        if "severity" in options:
            raise BadInput(
                f"{source}: severity goes with corruption", fix=f"add corruption={next(iter(KINDS))}"
            )
        return None
    if kind not in KINDS:
        raise BadInput(
            f"{source}: unknown corruption {kind!r}{suggest(kind, KINDS)}",
            fix=f"use one of {', '.join(KINDS)}",
        )
    severity = whole_option(source, options, "severity", 3)
    if severity not in SEVERITIES:
        raise BadInput(f"{source}: severity={severity} is not 1 to 5")
    return Corruption(kind, severity)


# Noise


def gaussian_noise(x: Pixels, scale: float, rng: np.random.Generator) -> Pixels:
    return x + scale * rng.standard_normal(x.shape, np.float32)


def shot_noise(x: Pixels, photons: float, rng: np.random.Generator) -> Pixels:
    return rng.poisson(x * photons) / photons


def impulse_noise(x: Pixels, share: float, rng: np.random.Generator) -> Pixels:
    dice = rng.random(x.shape, np.float32)
    return np.where(dice < share / 2, 0.0, np.where(dice < share, 1.0, x))


# Blur


def defocus_blur(x: Pixels, parameters: tuple[int, float], rng: np.random.Generator) -> Pixels:
    radius, alias = parameters
    y, z = np.mgrid[-radius - 2 : radius + 3, -radius - 2 : radius + 3]
    disk = cv2.GaussianBlur((y * y + z * z <= radius * radius).astype(np.float32), (0, 0), alias)
    return cv2.filter2D(x, -1, disk / disk.sum(), borderType=cv2.BORDER_REFLECT)


def glass_blur(x: Pixels, parameters: tuple[float, int, int], rng: np.random.Generator) -> Pixels:
    sigma, reach, times = parameters
    height, width = x.shape[:2]
    result, (rows, columns) = cv2.GaussianBlur(x, (0, 0), sigma), np.indices((height, width))
    for _ in range(times):
        dy, dx = rng.integers(-reach, reach + 1, (2, height, width))
        result = result[np.clip(rows + dy, 0, height - 1), np.clip(columns + dx, 0, width - 1)]
    return cv2.GaussianBlur(result, (0, 0), sigma)


def motion_blur(x: Pixels, parameters: tuple[int, float], rng: np.random.Generator) -> Pixels:
    return _smeared(x, *parameters, float(rng.uniform(-45, 45)))


def _smeared(x: np.ndarray, radius: int, sigma: float, angle: float) -> np.ndarray:
    """The picture smeared in a direction (degrees) by half of a Gaussian over 2 x ``radius`` pixels."""
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    kernel = np.zeros((4 * radius + 1, 4 * radius + 1), np.float32)
    rows = np.rint(2 * radius + steps * np.sin(np.radians(angle))).astype(int)
    columns = np.rint(2 * radius + steps * np.cos(np.radians(angle))).astype(int)
    np.add.at(kernel, (rows, columns), weights)
    return cv2.filter2D(x, -1, kernel / kernel.sum(), borderType=cv2.BORDER_REFLECT)


def zoom_blur(x: Pixels, parameters: tuple[float, float], rng: np.random.Generator) -> Pixels:
    factors = np.arange(1, *parameters)
    return (x + sum(_enlarged(x, factor) for factor in factors)) / (len(factors) + 1)


def _enlarged(x: np.ndarray, factor: float) -> np.ndarray:
    """The middle of a picture at ``factor`` times its size, cut to the picture's own size."""
    height, width = x.shape[:2]
    matrix = np.array(
        [[factor, 0, (1 - factor) * (width - 1) / 2], [0, factor, (1 - factor) * (height - 1) / 2]]
    )
    return cv2.warpAffine(x, matrix, (width, height), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT)


# Weather


def snow(x: Pixels, parameters: tuple[float, ...], rng: np.random.Generator) -> Pixels:
    mean, spread, zoom, threshold, radius, sigma, share = parameters
    flakes = _enlarged(mean + spread * rng.standard_normal(x.shape[:2], np.float32), zoom)
    flakes = np.clip(np.where(flakes < threshold, 0, flakes), 0, 1).astype(np.float32)
    flakes = _smeared(flakes, int(radius), sigma, float(rng.uniform(-135, -45)))[..., None]
    grey = cv2.cvtColor(x, cv2.COLOR_RGB2GRAY)[..., None]
    return share * x + (1 - share) * np.maximum(x, 1.5 * grey + 0.5) + flakes + flakes[::-1, ::-1]


def frost(x: Pixels, parameters: tuple[float, float], rng: np.random.Generator) -> Pixels:
    own, ice = parameters
    ridges = (1 - np.abs(2 * _plasma(x.shape[:2], 1.6, rng) - 1)) ** 4
    return own * x + ice * ridges[..., None] * np.array([0.85, 0.95, 1.0])


def fog(x: Pixels, parameters: tuple[float, float], rng: np.random.Generator) -> Pixels:
    density, decay = parameters
    brightest = float(x.max())
    return (x + density * _plasma(x.shape[:2], decay, rng)[..., None]) * brightest / (brightest + density)


def _plasma(
    shape: tuple[int, int], decay: float, rng: np.random.Generator
) -> Float[np.ndarray, "height width"]:
    """Noise 0..1 over all scales; the amplitude falls by ``decay`` from each to the next finer one."""
    height, width = shape
    total, amplitude, side = np.zeros(shape, np.float32), 1.0, 2
    while side < 2 * max(shape):
        layer = rng.uniform(-1, 1, (side + 1, side + 1)).astype(np.float32)
        total += amplitude * cv2.resize(layer, (width, height), interpolation=cv2.INTER_CUBIC)
        side, amplitude = 2 * side, amplitude / decay
    return (total - total.min()) / max(float(np.ptp(total)), 1e-9)


def brightness(x: Pixels, change: float, rng: np.random.Generator) -> Pixels:
    hsv = cv2.cvtColor(x, cv2.COLOR_RGB2HSV)
    hsv[..., 2] = np.clip(hsv[..., 2] + change, 0, 1)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)


# Digital


def contrast(x: Pixels, factor: float, rng: np.random.Generator) -> Pixels:
    mean = x.mean((0, 1), keepdims=True)
    return (x - mean) * factor + mean


def elastic_transform(x: Pixels, parameters: tuple[float, float, float], rng: np.random.Generator) -> Pixels:
    strength, sigma, shift = (SIDE * value for value in parameters)
    height, width = x.shape[:2]
    side = min(height, width) // 3
    corners = np.array([[1, 1], [1, -1], [-1, -1]]) * side + np.array([width, height]) // 2
    moved = corners + rng.uniform(-shift, shift, corners.shape)
    matrix = cv2.getAffineTransform(corners.astype(np.float32), moved.astype(np.float32))
    x = cv2.warpAffine(x, matrix, (width, height), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT_101)
    # A smooth field is computed on a coarser grid, whose noise is that much weaker.
    step = max(1, int(sigma / 4))
    size = (height // step + 1, width // step + 1)
    fields = [
        cv2.GaussianBlur(
            rng.uniform(-1, 1, size).astype(np.float32) / step,
            (0, 0),
            sigma / step,
            borderType=cv2.BORDER_REFLECT,
        )
        for _ in range(2)
    ]
    dx, dy = (
        strength * cv2.resize(field, (width, height), interpolation=cv2.INTER_LINEAR) for field in fields
    )
    rows, columns = np.indices((height, width), np.float32)
    return cv2.remap(x, columns + dx, rows + dy, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT)


def pixelate(x: Pixels, share: float, rng: np.random.Generator) -> Pixels:
    image = Image.fromarray((x * 255).astype(np.uint8))
    small = image.resize(
        (max(1, int(image.width * share)), max(1, int(image.height * share))), Image.Resampling.BOX
    )
    return np.asarray(small.resize(image.size, Image.Resampling.BOX), np.float32) / 255


def jpeg_compression(x: Pixels, quality: int, rng: np.random.Generator) -> Pixels:
    file = io.BytesIO()
    Image.fromarray((x * 255).astype(np.uint8)).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file), np.float32) / 255


def occlusion(x: Pixels, share: float, rng: np.random.Generator) -> Pixels:
    """A grey rectangle of the picture's shape over a share of it, as in cutout (arXiv 1708.04552)."""
    sides = [max(1, round(side * share**0.5)) for side in x.shape[:2]]
    top, left = (int(rng.integers(whole - part + 1)) for whole, part in zip(x.shape, sides, strict=False))
    result = x.copy()
    result[top : top + sides[0], left : left + sides[1]] = 0.5
    return result


KINDS: dict[str, tuple[Callable[..., Pixels], tuple]] = {
    "gaussian_noise": (gaussian_noise, (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": (shot_noise, (60, 25, 12, 5, 3)),
    "impulse_noise": (impulse_noise, (0.03, 0.06, 0.09, 0.17, 0.27)),
    "defocus_blur": (defocus_blur, ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))),
    "glass_blur": (glass_blur, ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))),
    "motion_blur": (motion_blur, ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))),
    "zoom_blur": (zoom_blur, ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))),
    "snow": (
        snow,
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    ),
    "frost": (frost, ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))),
    "fog": (fog, ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))),
    "brightness": (brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (contrast, (0.4, 0.3, 0.2, 0.1, 0.05)),
    "elastic_transform": (
        elastic_transform,
        ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
    ),
    "pixelate": (pixelate, (0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg_compression": (jpeg_compression, (25, 18, 15, 10, 7)),
    "occlusion": (occlusion, (0.05, 0.1, 0.2, 0.3, 0.4)),
}
"""Function and parameters by severity of each kind."""
