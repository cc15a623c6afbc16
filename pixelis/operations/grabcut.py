"""Classical proposals for the object at a point, and GrabCut of a map, without weights."""

from __future__ import annotations

import cv2
import numpy as np

from pixelis.operations.masks import Edges
from pixelis.operations.pixel_budget import shrink

WORK = 256
MIN_PIXELS = 12

_CELL = np.ones((3, 3), np.uint8)


def point_in(small: np.ndarray, region: Edges, point: tuple[float, float]) -> tuple[int, int]:
    """The pixel (x, y) of ``small``, a copy of ``region``, that shows a point of the picture."""
    left, top, right, bottom = region
    height, width = small.shape[:2]
    x, y = (point[0] - left) * width / (right - left), (point[1] - top) * height / (bottom - top)
    return min(int(x), width - 1), min(int(y), height - 1)


def box_in(small: np.ndarray, region: Edges, box: Edges) -> Edges:
    """The pixels of ``small``, a copy of ``region``, that show a box of the picture; at least one."""
    left, top, right, bottom = region
    across, down = small.shape[1] / (right - left), small.shape[0] / (bottom - top)
    x0, y0 = round((box[0] - left) * across), round((box[1] - top) * down)
    return x0, y0, max(x0 + 1, round((box[2] - left) * across)), max(y0 + 1, round((box[3] - top) * down))


def proposals(small: np.ndarray, at: tuple[int, int], seed: int) -> list[np.ndarray]:
    """Regions at all scales that contain the pixel ``at`` (x, y): bool [h, w] each."""
    lab = cv2.cvtColor(small, cv2.COLOR_RGB2LAB)
    proposed = []
    # Graph-based segments (Felzenszwalb and Huttenlocher), from fine to coarse.
    for pixels, coarseness in (
        (small, 100),
        (lab, 300),
        (small, 700),
        (lab, 700),
        (lab, 1500),
        (small, 3000),
    ):
        segments = cv2.ximgproc.segmentation.createGraphSegmentation(0.8, coarseness, 40).processImage(pixels)
        proposed.append(fill(segments == segments[at[1], at[0]]))
    proposed += [*_tolerance(lab, at), *_discs(small, at, seed)]
    return [r for r in proposed if MIN_PIXELS <= np.count_nonzero(r) <= 0.97 * r.size]


def refine(small: np.ndarray, probabilities: np.ndarray, allowed: np.ndarray, seed: int) -> np.ndarray:
    """GrabCut from a map of probabilities (float32 [h, w]) within ``allowed`` (bool [h, w])."""
    labels = np.where(probabilities > 0.5, cv2.GC_PR_FGD, cv2.GC_PR_BGD).astype(np.uint8)
    labels[probabilities > 0.9] = cv2.GC_FGD
    labels[(probabilities < 0.05) | ~allowed] = cv2.GC_BGD
    foreground = _grabcut(small, labels, seed, 3)
    if foreground is None:
        return (probabilities > 0.5) & allowed
    region = fill(foreground)
    count, parts, statistics, _ = cv2.connectedComponentsWithStats(region.astype(np.uint8), connectivity=4)
    if count > 2:
        region = parts == 1 + int(np.argmax(statistics[1:, cv2.CC_STAT_AREA]))
    return region & allowed


def fill(region: np.ndarray) -> np.ndarray:
    ground = np.pad(region.astype(np.uint8), 1)
    cv2.floodFill(ground, None, (0, 0), 2)
    return ground[1:-1, 1:-1] != 2


def _tolerance(lab: np.ndarray, at: tuple[int, int]) -> list[np.ndarray]:
    """Connected regions around the point of similar colour (CIELAB), for increasing tolerances."""
    smooth = cv2.bilateralFilter(lab, 7, 30, 5).astype(np.float32) * np.asarray([0.7, 1, 1], np.float32)
    reach = max(1, round(max(lab.shape[:2]) * 0.012))
    colour = np.median(smooth[_around(at, reach)].reshape(-1, 3), axis=0)
    difference = np.linalg.norm(smooth - colour, axis=2)
    result = []
    for tolerance in (8, 14, 20, 28, 38, 50, 65):
        similar = (difference <= tolerance).astype(np.uint8)
        similar[_around(at, 1)] = 1
        similar = cv2.morphologyEx(similar, cv2.MORPH_OPEN, _CELL)
        similar[_around(at, 1)] = 1
        result.append(fill(_connected(similar, at)))
    return result


def _discs(small: np.ndarray, at: tuple[int, int], seed: int) -> list[np.ndarray]:
    height, width = small.shape[:2]
    y, x = np.ogrid[:height, :width]
    distance = np.hypot(x - at[0], y - at[1]).astype(np.float32)
    result = []
    for share in (0.06, 0.12, 0.22, 0.4):
        radius = share * max(height, width)
        window = _around(at, round(max(12.0, 2 * radius)))
        pixels = shrink(small[window], 112)
        near = cv2.resize(distance[window], pixels.shape[1::-1])
        labels = np.full(near.shape, cv2.GC_BGD, np.uint8)
        for bound, label in ((1.4, cv2.GC_PR_BGD), (1.0, cv2.GC_PR_FGD), (0.25, cv2.GC_FGD)):
            labels[near <= bound * radius] = label
        if not (labels == cv2.GC_BGD).any():
            labels[[0, -1]] = cv2.GC_BGD
            labels[:, [0, -1]] = cv2.GC_BGD
        cut = _grabcut(pixels, labels, seed, 2)
        if cut is not None:
            region = np.zeros((height, width), np.uint8)
            part = region[window]
            part[:] = cv2.resize(cut.astype(np.uint8), part.shape[1::-1], interpolation=cv2.INTER_NEAREST)
            region[at[1], at[0]] = 1
            result.append(fill(_connected(region, at)))
    return result


def _grabcut(pixels: np.ndarray, labels: np.ndarray, seed: int, rounds: int) -> np.ndarray | None:
    """Foreground after ``rounds`` of GrabCut; None when the labels leave too little of either side."""
    ground, figure = (labels & 1) == 0, (labels & 1) == 1
    # Each side is a mixture of five Gaussians
    if np.count_nonzero(ground) < 5 or np.count_nonzero(figure) < 5:
        return None
    labels = labels.copy()
    cv2.setRNGSeed(seed)
    models = np.zeros((1, 65)), np.zeros((1, 65))
    cv2.grabCut(np.ascontiguousarray(pixels[..., ::-1]), labels, None, *models, rounds, cv2.GC_INIT_WITH_MASK)  # type: ignore[call-overload]
    return (labels & 1) == 1


def contrast(region: np.ndarray, lab: np.ndarray) -> float:
    """1 - overlap of the colour histograms just inside and just outside the outline."""
    inside = region.astype(np.uint8)
    reach = int(np.clip(round(0.25 * np.sqrt(np.count_nonzero(region) / np.pi)), 2, 10))
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * reach + 1, 2 * reach + 1))
    inner = region & (cv2.erode(inside, disc) == 0)
    outer = (cv2.dilate(inside, disc) > 0) & ~region
    if not inner.any() or not outer.any():
        return 0.0
    return 1.0 - float(np.minimum(_histogram(lab[inner]), _histogram(lab[outer])).sum())


def _histogram(colours: np.ndarray) -> np.ndarray:
    light, a, b = (
        colours[:, 0] >> 5,
        *((colours[:, i].astype(np.int16) - 64).clip(0, 127) >> 4 for i in (1, 2)),
    )
    return np.bincount(light.astype(np.int64) * 64 + a * 8 + b, minlength=512) / len(colours)


def on_border(region: np.ndarray) -> float:
    """Share of the outline that lies on the border of the copy, 0..1."""
    inside = np.pad(region.astype(np.uint8), 1)
    outline = np.count_nonzero((cv2.dilate(inside, _CELL) - cv2.erode(inside, _CELL))[1:-1, 1:-1])
    border = int(region[0].sum()) + int(region[-1].sum()) + int(region[:, 0].sum()) + int(region[:, -1].sum())
    return border / (border + outline / 2 + 1e-6)


def _around(at: tuple[int, int], reach: int) -> tuple[slice, slice]:
    return slice(max(0, at[1] - reach), at[1] + reach + 1), slice(max(0, at[0] - reach), at[0] + reach + 1)


def _connected(region: np.ndarray, at: tuple[int, int]) -> np.ndarray:
    _, parts = cv2.connectedComponents(region, connectivity=4)
    return parts == parts[at[1], at[0]]
