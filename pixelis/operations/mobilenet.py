"""The packaged segmenter: a small network for points and boxes, run by ONNX Runtime on one CPU thread.

For a point it sees the region and the surroundings of what it found there, each also mirrored. The masks and
classical proposals are averaged by their expected IoU. ``weights/README.md`` has licence and training.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from pixelis.errors import OperationError
from pixelis.operations import grabcut
from pixelis.operations.masks import Edges, Mask, Segment
from pixelis.operations.pixel_budget import shrink

WEIGHTS = Path(__file__).parent / "weights" / "mobilenet.onnx"
SIDE = 256
REFINE = 768
"""Longest side up to which outlines follow the picture's edges; larger ones are enlarged."""
MARGIN = 0.6
BOX_MARGIN = 0.35
WORTHWHILE = 0.75
"""No second look if it would show more than this share of the region's sides."""
THUMB = 64
WEIGHTS_OF_CHOICE = (
    0.237, 0.542, -0.076, 0.196, -0.113, 0.087, -0.182, -0.055, -0.01,
    -0.277, -0.998, -0.1, 0.081, 0.706, 0.159, 0.657, 0.127,
)  # fmt: skip
"""Of the features of `describe`: ridge regression to the IoU of 339 objects (`scripts/fit_segmenter.py`)."""
TEMPERATURE = 0.08
LEVELS = (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6)
CALIBRATION = -0.018, 0.529, 0.407
"""Score = first + others * features of `certainty`, fitted on the same objects."""
GRABCUT = 0.25
"""Share of the GrabCut in the map of a box; the network has the rest."""
BOX_TEMPERATURE = 0.1
BOX_CALIBRATION = -0.067, 0.799, 0.19
MIN_BOX_CONTRAST = 0.12
"""Least contrast (0..1) of a box's object to its surroundings: empty ground has at most 0.09."""
MIN_CONTRAST = 1.0


@functools.cache
def load() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(WEIGHTS), options, providers=["CPUExecutionProvider"])


def segment(
    picture: np.ndarray, region: Edges, point: tuple[float, float] | None, box: Edges | None, seed: int = 0
) -> Segment:
    """Segment the object at a point or in a box (pixels of the picture) within ``region``.

    Raises OperationError ``nothing_found``.
    """
    if box is not None:
        return _by_box(picture, box, seed)
    assert point is not None
    maps, thumbs, features = describe(picture, region, point, seed)
    values = features @ np.array(WEIGHTS_OF_CHOICE)
    best = int(np.argmax(values))
    shares = weights_of(values)
    level, signs = certainty(thumbs, shares, features[:, -1])
    place = maps[best][1]
    mean = np.zeros((SIDE // 2, SIDE // 2), np.float32)
    for share, (mask, own) in zip(shares, maps, strict=True):
        mean += np.float32(share) * placed(mask, own, place)
    outline = _outline(picture, place, mean + np.float32(0.5 - level), point)
    return Segment(outline, _score(CALIBRATION, signs), "mobilenet")


def _score(calibration: tuple[float, float, float], signs: np.ndarray) -> float:
    return round(float(np.clip(calibration[0] + signs @ calibration[1:], 0.0, 0.95)), 3)


def describe(
    picture: np.ndarray, region: Edges, point: tuple[float, float], seed: int
) -> tuple[list[tuple[np.ndarray, Edges]], np.ndarray, np.ndarray]:
    """All masks of the network and the classical proposals, with what decides their weights.

    Returns the masks with their regions; copies of them over ``region``, float32 [n, THUMB * THUMB]; and
    features [n, 17]: overlap with the network's mean, agreement with the proposals, share of the outline on
    the border, whether it is a proposal, a proposal's agreement, consistency between the looks, sharpness,
    log size and its square, products and squares of these, and the IoU that the network expects.
    """
    masks, scores = candidates(picture, region, point, None)
    looks = [(masks, scores, region), (*candidates(picture, region, point, None, mirrored=True), region)]
    nearer = _surroundings(masks[int(np.argmax(scores))], region)
    if nearer is not None:
        looks += [(*candidates(picture, nearer, point, None, mirrored), nearer) for mirrored in (False, True)]
    maps = [(mask, place) for masks, _, place in looks for mask in masks]
    look = np.repeat(np.arange(len(looks)), len(masks))
    left, top, right, bottom = region
    small = shrink(picture[top:bottom, left:right], grabcut.WORK)
    at = grabcut.point_in(small, region, point)
    count = len(maps)
    maps += [(proposal.astype(np.float32), region) for proposal in grabcut.proposals(small, at, seed)]
    thumbs = np.stack(
        [
            cv2.resize(placed(mask, place, region), (THUMB, THUMB), interpolation=cv2.INTER_AREA).ravel()
            for mask, place in maps
        ]
    )
    hard = (thumbs > 0.5).astype(np.float32)
    area = hard.sum(1) + 1e-6
    overlap = _overlap(hard, thumbs[:count].mean(0))
    proposed, classical = hard[count:], np.arange(len(maps)) >= count
    dice = 2 * (hard @ proposed.T) / (area[:, None] + proposed.sum(1)[None] + 1e-6)
    agreement = (dice.sum(1) - classical) / np.maximum(1, len(proposed) - classical)
    border = [grabcut.on_border(mask.reshape(THUMB, THUMB) > 0.5) for mask in hard]
    both = hard @ hard[:count].T
    shared = both / (area[:, None] + area[None, :count] - both + 1e-6)
    nearest = np.stack([shared[:, look == number].max(1) for number in range(len(looks))], 1)
    others = np.ones(nearest.shape, bool)
    others[np.arange(count), look] = False
    consistency = (nearest * others).sum(1) / others.sum(1)
    size = np.log(area / THUMB**2 + 1e-3)
    columns = [overlap, agreement, border, classical, classical * agreement, consistency]
    columns += [_overlap(hard, thumbs), size, size**2]
    columns += [overlap * consistency, overlap * agreement, consistency * size, agreement * size]
    promised = np.zeros(len(maps))
    promised[:count] = np.concatenate([scores for _, scores, _ in looks])
    columns += [overlap**2, consistency**2, agreement**2, promised]
    return maps, thumbs, np.stack(columns, 1)


def weights_of(values: np.ndarray) -> np.ndarray:
    return softmax(values, TEMPERATURE)


def softmax(values: np.ndarray, temperature: float) -> np.ndarray:
    shares = np.exp((values - values.max()) / temperature)
    return shares / shares.sum()


def best_level(mean: np.ndarray) -> tuple[float, float]:
    """The threshold in LEVELS with the highest expected IoU, and that IoU."""
    expected = []
    for level in LEVELS:
        above = mean > level
        both = float(mean[above].sum())
        expected.append(both / (float(mean.sum()) + float(above.sum()) - both + 1e-6))
    best = int(np.argmax(expected))
    return LEVELS[best], expected[best]


def certainty(thumbs: np.ndarray, shares: np.ndarray, promised: np.ndarray) -> tuple[float, np.ndarray]:
    """The threshold of the averaged masks, and the two features of its score.

    These are the IoU that the probabilities predict, and the weighted mean of the IoU that the network
    expects (``promised`` [n], 0 for proposals).
    """
    level, expected = best_level(shares @ thumbs)
    return level, np.array([expected, (shares @ promised) / (shares[promised > 0].sum() + 1e-6)])


def _overlap(masks: np.ndarray, others: np.ndarray) -> np.ndarray:
    return np.minimum(masks, others).sum(1) / (np.maximum(masks, others).sum(1) + 1e-6)


def _by_box(picture: np.ndarray, box: Edges, seed: int) -> Segment:
    region = around(box, (picture.shape[0], picture.shape[1]), BOX_MARGIN)
    mean, level, signs = cut_box(picture, box, region, seed)
    left, top, right, bottom = region
    small = cv2.resize(picture[top:bottom, left:right], mean.shape[::-1], interpolation=cv2.INTER_AREA)
    if grabcut.contrast(mean > level, cv2.cvtColor(small, cv2.COLOR_RGB2LAB)) < MIN_BOX_CONTRAST:
        raise OperationError(
            "no object in the box differs from its surroundings: give another box", code="nothing_found"
        )
    mask = _outline(picture, region, mean + np.float32(0.5 - level), None)
    return Segment(mask, _score(BOX_CALIBRATION, signs), "mobilenet")


def cut_box(
    picture: np.ndarray, box: Edges, region: Edges, seed: int
) -> tuple[np.ndarray, float, np.ndarray]:
    """The object of a box over ``region``: probabilities float32 [h, w], threshold, features of the score.

    The network's masks, weighted by expected IoU, averaged with a GrabCut that starts from them.
    """
    left, top, right, bottom = region
    small = shrink(picture[top:bottom, left:right], grabcut.WORK)
    height, width = small.shape[:2]
    looks = [candidates(picture, region, None, box, mirrored) for mirrored in (False, True)]
    masks, scores = (np.concatenate(parts) for parts in zip(*looks, strict=True))
    shares = softmax(scores, BOX_TEMPERATURE)
    network = cv2.resize(np.tensordot(shares, masks, 1), (width, height), interpolation=cv2.INTER_LINEAR)
    allowed = np.zeros((height, width), bool)
    x0, y0, x1, y1 = grabcut.box_in(small, region, box)
    allowed[y0:y1, x0:x1] = True
    refined = grabcut.refine(small, network, allowed, seed)
    mean = np.where(allowed, (1 - GRABCUT) * network + GRABCUT * refined, 0).astype(np.float32)
    level, expected = best_level(mean)
    if not (mean > level).any():  # the network sees no object, such as in a plain drawing
        mean = grabcut.refine(small, np.float32(0.6) * allowed, allowed, seed).astype(np.float32)
    return mean, level, np.array([expected, shares @ scores])


def _surroundings(mask: np.ndarray, region: Edges) -> Edges | None:
    """The region of the second look; None if the object fills much of the first."""
    left, top, right, bottom = region
    x, y, w, h = cv2.boundingRect((mask > 0.5).astype(np.uint8))
    if not (w and h):
        return None
    across, down = (right - left) / mask.shape[1], (bottom - top) / mask.shape[0]
    start, end = (left + x * across, top + y * down), (left + (x + w) * across, top + (y + h) * down)
    near = around((*map(round, start), *map(round, end)), (bottom, right), MARGIN)
    near = max(near[0], left), max(near[1], top), near[2], near[3]
    large = max((near[2] - near[0]) / (right - left), (near[3] - near[1]) / (bottom - top)) >= WORTHWHILE
    return None if large else near


def placed(mask: np.ndarray, place: Edges, frame: Edges) -> np.ndarray:
    """A mask of ``place`` resampled to ``frame``, float32 [SIDE / 2, SIDE / 2], 0 outside of ``place``."""
    size = SIDE // 2
    if place == frame:
        return cv2.resize(mask, (size, size), interpolation=cv2.INTER_AREA)
    across, down = size / (frame[2] - frame[0]), size / (frame[3] - frame[1])
    width, height = max(1, round((place[2] - place[0]) * across)), max(1, round((place[3] - place[1]) * down))
    if width < mask.shape[1] and height < mask.shape[0]:
        mask = cv2.resize(mask, (width, height), interpolation=cv2.INTER_AREA)
    wider, higher = width / mask.shape[1], height / mask.shape[0]
    left, top = (place[0] - frame[0]) * across, (place[1] - frame[1]) * down
    matrix = np.array([[wider, 0, left + (wider - 1) / 2], [0, higher, top + (higher - 1) / 2]], np.float32)
    return cv2.warpAffine(mask, matrix, (size, size))


def candidates(
    picture: np.ndarray,
    region: Edges,
    point: tuple[float, float] | None,
    box: Edges | None,
    mirrored: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """All masks of a region: probabilities float32 [n, SIDE / 2, SIDE / 2], and their expected IoU."""
    left, top, right, bottom = region
    part = picture[top:bottom, left:right]
    if part.std() < MIN_CONTRAST:
        raise OperationError(
            "no object differs from its surroundings here: move the point or the box", code="nothing_found"
        )
    kind = cv2.INTER_AREA if min(part.shape[:2]) > SIDE else cv2.INTER_LINEAR
    square = cv2.resize(part, (SIDE, SIDE), interpolation=kind).astype(np.float32)
    across, down = SIDE / (right - left), SIDE / (bottom - top)
    spot = None if point is None else ((point[0] - left) * across, (point[1] - top) * down)
    edges = box and (
        (box[0] - left) * across,
        (box[1] - top) * down,
        (box[2] - left) * across,
        (box[3] - top) * down,
    )
    step = -1 if mirrored else 1
    inputs = {"picture": square[None, :, ::step], "prompt": prompt(SIDE, spot, edges)[None, ..., ::step]}
    masks, scores = load().run(None, {name: np.ascontiguousarray(array) for name, array in inputs.items()})
    return masks[0, ..., ::step], scores[0]


def around(box: Edges, size: tuple[int, int], margin: float) -> Edges:
    """The box and its surroundings within a picture of ``size`` (height, width)."""
    left, top, right, bottom = box
    across, down = max(4, round(margin * (right - left))), max(4, round(margin * (bottom - top)))
    return (
        max(0, left - across),
        max(0, top - down),
        min(size[1], right + across),
        min(size[0], bottom + down),
    )


def _outline(
    picture: np.ndarray, region: Edges, inside: np.ndarray, point: tuple[float, float] | None
) -> Mask:
    left, top, right, bottom = region
    guide = shrink(picture[top:bottom, left:right], REFINE)
    soft = cv2.resize(inside, guide.shape[1::-1], interpolation=cv2.INTER_LINEAR)
    soft = cv2.ximgproc.guidedFilter(guide, soft, max(1, round(2 * max(guide.shape[:2]) / SIDE)), 60.0)
    full = cv2.resize(soft, (right - left, bottom - top), interpolation=cv2.INTER_LINEAR) > 0.5
    count, parts, statistics, _ = cv2.connectedComponentsWithStats(full.astype(np.uint8), connectivity=4)
    if count == 1:
        raise OperationError(
            "no distinct object at this point: move the point or give a box", code="nothing_found"
        )
    if count > 2:
        piece = 1 + int(np.argmax(statistics[1:, cv2.CC_STAT_AREA]))
        if point is not None:
            x, y = min(int(point[0]) - left, right - left - 1), min(int(point[1]) - top, bottom - top - 1)
            piece = int(parts[y, x]) or piece
        full = parts == piece
    return Mask.of(full, left, top, *picture.shape[:2])


def prompt(
    side: int, point: tuple[float, float] | None, box: tuple[float, float, float, float] | None
) -> np.ndarray:
    """The map of a point or a box (pixels of a square of ``side``): float32 [3, side / 4, side / 4].

    Channels: where the object certainly is, where it is likely, and the interior of the box.
    """
    size = side // 4
    x, y = np.meshgrid(np.arange(size, dtype=np.float32) + 0.5, np.arange(size, dtype=np.float32) + 0.5)
    inside = np.zeros((size, size), np.float32)
    if box is None:
        assert point is not None
        centre = (point[0] / 4, point[1] / 4)
        certain = (0.02 * size, 0.02 * size)
        likely = (0.12 * size, 0.12 * size)
    else:
        left, top, right, bottom = (value / 4 for value in box)
        centre = (left + right) / 2, (top + bottom) / 2
        certain = max(0.8, 0.15 * (right - left)), max(0.8, 0.15 * (bottom - top))
        likely = 2 * certain[0], 2 * certain[1]
        inside = np.clip(np.minimum(x - left, right - x) + 0.5, 0, 1) * np.clip(
            np.minimum(y - top, bottom - y) + 0.5, 0, 1
        )
    maps = [
        np.exp(-0.5 * (((x - centre[0]) / a) ** 2 + ((y - centre[1]) / b) ** 2)) for a, b in (certain, likely)
    ]
    return np.stack([*maps, inside]).astype(np.float32)
