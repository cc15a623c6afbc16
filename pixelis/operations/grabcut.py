"""The classical segmenter: the object at a point or in a box, from colours and edges, without weights.

For a point, graph-based segmentation, colour tolerance and GrabCut from discs propose regions at all scales;
the winner agrees with most others, differs from its surroundings and touches the border little. For a box,
GrabCut decides alone. Both work on a copy of at most WORK pixels a side; the outline is then refined along
the picture's edges.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from pixelis.errors import OperationError
from pixelis.operations.masks import Edges, Mask, Segment
from pixelis.operations.pixel_budget import shrink

WORK = 256
"""Longest side of the copy that is segmented."""
REFINE = 768
"""Longest side up to which the outline follows the picture's edges; larger ones are enlarged."""
MIN_CONTRAST = 0.03
"""Least contrast (0..1) of a region to its surroundings."""
COLLAPSED, MIDDLE = 0.1, 0.5
"""A region below the share COLLAPSED of its box is tried again with its middle (MIDDLE of each side) as
certain object."""
MIN_PIXELS = 12
"""Least pixels of a region in the copy."""

WEIGHTS = {"agreement": 1.05, "contrast": 0.2, "solidity": 0.24, "border": -0.56}
"""Weights of a region's features: ridge regression to the overlap with 92 true masks, rounded."""
OFFSET = -0.11

_CELL = np.ones((3, 3), np.uint8)


def by_point(picture: np.ndarray, region: Edges, point: tuple[float, float], seed: int = 0) -> Segment:
    """Segment the most distinct region around a point (pixels of the picture) in ``region``. Raises
    ``nothing_found``."""
    left, top, right, bottom = region
    small = shrink(picture[top:bottom, left:right], WORK)
    lab = cv2.cvtColor(small, cv2.COLOR_RGB2LAB)
    proposed = proposals(small, point_in(small, region, point), seed)
    scores = _scores(proposed, lab) if proposed else np.full(1, -np.inf)
    best = int(np.argmax(scores))
    if not np.isfinite(scores[best]):
        raise OperationError(
            "no distinct object at this point: move the point or give a box", code="nothing_found"
        )
    # The maximum of many estimates is biased upwards: map it to the measured overlap.
    score = float(np.clip(0.2 + 0.63 * scores[best], 0.0, 0.95))
    return Segment(_enlarge(picture, region, proposed[best]), round(score, 3), "grabcut")


def by_box(picture: np.ndarray, box: Edges, seed: int = 0) -> Segment:
    """Segment with GrabCut: the box is probable foreground, the rest background. Raises ``nothing_found``."""
    height, width = picture.shape[:2]
    left, top, right, bottom = box
    across, down = max(2, (right - left) // 3), max(2, (bottom - top) // 3)
    region = max(0, left - across), max(0, top - down), min(width, right + across), min(height, bottom + down)
    small = shrink(picture[region[1] : region[3], region[0] : region[2]], WORK)
    x0, y0, x1, y1 = box_in(small, region, box)
    labels = np.full(small.shape[:2], cv2.GC_BGD, np.uint8)
    labels[y0:y1, x0:x1] = cv2.GC_PR_FGD
    if (x0, y0, x1, y1) == (0, 0, small.shape[1], small.shape[0]):  # no surroundings: use the border
        labels[[0, -1]] = cv2.GC_PR_BGD
        labels[:, [0, -1]] = cv2.GC_PR_BGD
    inside = _cut_out(small, labels, seed)
    if np.count_nonzero(inside) < COLLAPSED * (x1 - x0) * (y1 - y0):
        # The surroundings have the same colours: mark the middle as certain foreground.
        middle = np.zeros(small.shape[:2], np.uint8)
        axes = max(1, round((x1 - x0) * MIDDLE / 2)), max(1, round((y1 - y0) * MIDDLE / 2))
        cv2.ellipse(middle, ((x0 + x1) // 2, (y0 + y1) // 2), axes, 0, 0, 360, 1, -1)
        labels[(middle > 0) & (labels == cv2.GC_PR_FGD)] = cv2.GC_FGD
        inside = _cut_out(small, labels, seed)
    difference = contrast(inside, cv2.cvtColor(small, cv2.COLOR_RGB2LAB))
    if np.count_nonzero(inside) < MIN_PIXELS or difference < MIN_CONTRAST:
        raise OperationError(
            "no object in the box differs from its surroundings: give another box", code="nothing_found"
        )
    inner = np.zeros_like(inside)
    inner[y0:y1, x0:x1] = True
    _, _, w, h = cv2.boundingRect(inside.astype(np.uint8))
    tight = w * h / max(1, (x1 - x0) * (y1 - y0))
    score = 0.35 + 0.35 * min(tight, 1.0) + 0.25 * difference
    mask = _enlarge(picture, region, inside & inner)
    return Segment(mask, round(float(np.clip(score, 0.0, 1.0)), 3), "grabcut")


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
    """GrabCut that starts from a map of probabilities (float32 [h, w]) and stays within ``allowed`` (bool [h,
    w])."""
    labels = np.where(probabilities > 0.5, cv2.GC_PR_FGD, cv2.GC_PR_BGD).astype(np.uint8)
    labels[probabilities > 0.9] = cv2.GC_FGD
    labels[(probabilities < 0.05) | ~allowed] = cv2.GC_BGD
    foreground = _grabcut(small, labels, seed, 3)
    return (probabilities > 0.5 if foreground is None else _largest(fill(foreground))) & allowed


def _cut_out(small: np.ndarray, labels: np.ndarray, seed: int) -> np.ndarray:
    foreground = _grabcut(small, labels, seed, 4)
    return np.zeros(small.shape[:2], bool) if foreground is None else _largest(fill(foreground))


def fill(region: np.ndarray) -> np.ndarray:
    """A bool region with its holes filled."""
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
    """GrabCut from discs around the point, each in a window of its size."""
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


def _scores(proposed: Sequence[np.ndarray], lab: np.ndarray) -> np.ndarray:
    """Expected overlap of each proposed region with the object, about 0..1; minus infinity without
    contrast.
    """
    thumbs = np.stack(
        [cv2.resize(r.astype(np.float32), (64, 64), interpolation=cv2.INTER_AREA).ravel() for r in proposed]
    )
    areas = thumbs.sum(1)
    overlap = 2 * (thumbs @ thumbs.T) / (areas[:, None] + areas[None] + 1e-6)
    np.fill_diagonal(overlap, 0)
    solidity = []
    for region in proposed:
        outlines, _ = cv2.findContours(region.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
        hull = float(cv2.contourArea(cv2.convexHull(max(outlines, key=len))))
        area = float(np.count_nonzero(region))
        solidity.append(area / max(area, hull + 1))
    features = {
        "agreement": overlap.mean(1),
        "contrast": np.asarray([contrast(region, lab) for region in proposed]),
        "solidity": np.asarray(solidity),
        "border": np.asarray([on_border(region) for region in proposed]),
    }
    scores = OFFSET + sum(
        (WEIGHTS[name] * values for name, values in features.items()), np.zeros(len(proposed))
    )
    return np.where(features["contrast"] < MIN_CONTRAST, -np.inf, scores)


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


def _enlarge(picture: np.ndarray, region: Edges, inside: np.ndarray) -> Mask:
    """Scale a region of the copy to the picture, refined along its edges up to REFINE."""
    left, top, right, bottom = region
    height, width = inside.shape
    fx, fy = (right - left) / width, (bottom - top) / height
    if fx <= 1.0 and fy <= 1.0:
        return Mask.of(inside, left, top, *picture.shape[:2])
    x, y, w, h = cv2.boundingRect(inside.astype(np.uint8))
    x0, y0, x1, y1 = max(0, x - 2), max(0, y - 2), min(width, x + w + 2), min(height, y + h + 2)
    edges = round(x0 * fx), round(y0 * fy), round(x1 * fx), round(y1 * fy)
    full = edges[2] - edges[0], edges[3] - edges[1]
    window = picture[top + edges[1] : top + edges[3], left + edges[0] : left + edges[2]]
    guide = shrink(window, REFINE)
    coarse = cv2.resize(
        inside[y0:y1, x0:x1].astype(np.float32), guide.shape[1::-1], interpolation=cv2.INTER_CUBIC
    )
    radius = max(1, round(1.5 * guide.shape[1] / (x1 - x0)))
    soft = cv2.ximgproc.guidedFilter(guide, coarse, radius, 60.0)
    soft = np.where(_largest(soft > 0.5), soft, np.minimum(soft, 0.5))
    enlarged = cv2.resize(soft, full, interpolation=cv2.INTER_LINEAR) > 0.5
    return Mask.of(enlarged, left + edges[0], top + edges[1], *picture.shape[:2])


def _around(at: tuple[int, int], reach: int) -> tuple[slice, slice]:
    return slice(max(0, at[1] - reach), at[1] + reach + 1), slice(max(0, at[0] - reach), at[0] + reach + 1)


def _connected(region: np.ndarray, at: tuple[int, int]) -> np.ndarray:
    _, parts = cv2.connectedComponents(region, connectivity=4)
    return parts == parts[at[1], at[0]]


def _largest(region: np.ndarray) -> np.ndarray:
    count, parts, statistics, _ = cv2.connectedComponentsWithStats(region.astype(np.uint8), connectivity=4)
    if count <= 2:
        return region
    return parts == 1 + int(np.argmax(statistics[1:, cv2.CC_STAT_AREA]))
