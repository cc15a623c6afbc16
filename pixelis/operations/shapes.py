"""Shape measures of a mask, exact within one per cent for drawn discs, ellipses and polygons.

Lengths are taken from the 0.5 contour of the slightly blurred mask: counting pixel sides overestimates
slanted outlines.
"""

from __future__ import annotations

import math

import cv2
import numpy as np

LARGEST = 1024
BLUR = 0.7
STRAIGHT = 0.5
"""Pixels, chosen with BLUR: perimeters of discs, ellipses and polygons are exact within 0.5 %."""
CORNER = 0.68
"""Pixels of contour length that the blur removes at a right angle."""
ROUND = 0.002
"""Largest relative area difference of a round shape to its ellipse; a regular octagon has 0.0025."""
TOLERANCE = 0.02
"""Tolerance of an outline's polygon, as a share of its length."""


def centroid(inside: np.ndarray) -> tuple[float, float]:
    """x, y in pixels from the window's corner; the center of the first pixel is 0.5."""
    m = cv2.moments(np.ascontiguousarray(inside).view(np.uint8), binaryImage=True)
    return m["m10"] / m["m00"] + 0.5, m["m01"] / m["m00"] + 0.5


def measure(inside: np.ndarray) -> dict[str, float | int | None]:
    """Shape measures of a bool [h, w] mask, by name.

    ``aspect_ratio``: width / height of the upright box. ``rotated_*``: of the tightest box. ``perimeter``: of
    outline and holes. ``circularity``: 4 pi area / perimeter^2. ``solidity``: area / area of the convex hull.
    ``convexity``: perimeter of the hull / of the outline. ``eccentricity``, ``orientation``: of the ellipse
    with the same second moments; degrees counter-clockwise from the x axis, 0..180, None where no axis is
    longer. ``corners``: of the outline's polygon, 0 for round shapes.
    """
    height, width = inside.shape
    area = float(np.count_nonzero(inside))
    eccentricity, orientation, ellipse = _moments(inside, area)
    outline, inner, scale = _contours(inside)
    outer_length, hull = _length(outline), cv2.convexHull(outline)
    outer_area = cv2.contourArea(outline) * scale * scale
    hull_area = cv2.contourArea(hull) * scale * scale
    _, sides, _ = cv2.minAreaRect(outline)
    long, short = max(sides) * scale, min(sides) * scale
    solidity = area / (
        area + max(0.0, hull_area - outer_area) + sum(cv2.contourArea(c) for c in inner) * scale * scale
    )
    if inner:
        rounded = 4 * math.pi * outer_area > 0.95 * (outer_length * scale) ** 2
    else:
        rounded = abs(ellipse / area - 1) < ROUND and solidity > 0.97
    corners = 0 if rounded else len(cv2.approxPolyDP(outline, TOLERANCE * outer_length, True))
    perimeter = (outer_length + CORNER * corners + sum(map(_length, inner))) * scale
    return {
        "aspect_ratio": width / height,
        "rotated_aspect_ratio": long / max(short, 1e-6),
        "rotated_length": long,
        "rotated_width": short,
        "perimeter": perimeter,
        "circularity": min(1.0, 4 * math.pi * area / perimeter**2),
        "solidity": solidity,
        "convexity": min(1.0, _length(hull) / max(outer_length, 1e-6)),
        "eccentricity": eccentricity,
        "orientation": orientation,
        "corners": corners,
        "holes": len(inner),
    }


def _moments(inside: np.ndarray, area: float) -> tuple[float, float | None, float]:
    m = cv2.moments(np.ascontiguousarray(inside).view(np.uint8), binaryImage=True)
    xx, yy, xy = m["mu20"] / area + 1 / 12, m["mu02"] / area + 1 / 12, -m["mu11"] / area  # y up
    spread = math.sqrt(((xx - yy) / 2) ** 2 + xy * xy)
    large, small = (xx + yy) / 2 + spread, max((xx + yy) / 2 - spread, 1e-9)
    eccentricity = math.sqrt(max(0.0, 1 - small / large))
    angle = math.degrees(0.5 * math.atan2(2 * xy, xx - yy)) % 180
    return eccentricity, angle if eccentricity > 0.2 else None, 4 * math.pi * math.sqrt(large * small)


def _contours(inside: np.ndarray) -> tuple[np.ndarray, list[np.ndarray], float]:
    """The largest piece's outline and holes, float32 [n, 1, 2], in pixels of a copy, and their size."""
    from skimage.measure import find_contours

    # A thin mask is not scaled below 24 pixels, so that it is not lost.
    scale = max(1.0, min(max(inside.shape) / LARGEST, min(inside.shape) / 24))
    shares = np.ascontiguousarray(inside).view(np.uint8) * np.uint8(255)
    if scale > 1:
        size = max(1, round(inside.shape[1] / scale)), max(1, round(inside.shape[0] / scale))
        shares = np.asarray(cv2.resize(shares, size, interpolation=cv2.INTER_AREA))
        scale = math.sqrt(inside.size / shares.size)
    elif min(inside.shape) < 24 and inside.size < 200_000:  # too few pixels to blur: each becomes a square
        shares, scale = np.kron(shares, np.ones((8, 8), np.uint8)), 1 / 8
    soft = cv2.GaussianBlur(np.pad(shares, 4).astype(np.float32) / 255, (0, 0), BLUR)
    contours = [c[:, None, ::-1].astype(np.float32) for c in find_contours(soft, 0.5)]
    if not contours:  # a hairline that the blur removed
        height, width = soft.shape
        ring = (
            np.array([[4, 4], [width - 4, 4], [width - 4, height - 4], [4, height - 4]], np.float32)[:, None]
            - 0.5
        )
        return ring, [], scale
    sizes = [cv2.contourArea(c, oriented=True) for c in contours]
    first = int(np.argmax(np.abs(sizes)))
    holes = [c for c, size in zip(contours, sizes, strict=True) if size * sizes[first] < 0 and abs(size) > 1]
    return contours[first], holes, scale


def _length(contour: np.ndarray) -> float:
    """Length of the contour's polygon, without the ripple along slanted edges."""
    return float(cv2.arcLength(cv2.approxPolyDP(contour, STRAIGHT, True), True))
