"""The packaged segmenter: a network that sees the picture and a point or a box, run by ONNX Runtime on one CPU thread.

It looks twice: at the whole region, and at the surroundings of what it found there, so that small objects get enough pixels. Of
the masks for a point (part, whole and in between) that with the highest expected IoU is taken. ``weights/README.md`` has the
licence of the weights and how to train them again.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from pixelis.errors import MissingDependency, OperationError
from pixelis.operations import grabcut
from pixelis.operations.masks import Edges, Mask, Segment
from pixelis.operations.pixel_budget import shrink

WEIGHTS = Path(__file__).parent / "weights" / "mobilenet.onnx"
SIDE = 256
"""Side of the square that a region is scaled to for the network."""
REFINE = 768
"""Longest side up to which the outline is refined along the picture's edges; beyond that it is only enlarged."""
MARGIN = 0.6
"""Surroundings of the second look, as a share of the object's box on each side."""
WORTHWHILE = 0.75
"""Largest share of the region's sides that the surroundings may have for a second look."""
THUMB = 64
"""Side of the copies on which masks are compared."""
WEIGHTS_OF_CHOICE, OFFSET = (0.556, 0.569, -0.202, -0.02, 0.087), -0.007
"""Of the features of ``describe``: ridge regression to the IoU of all masks of 130 objects of BSDS500 and 38 others."""
CALIBRATION = 0.135, 0.843
"""Score = first + second * the regression's value at the chosen mask, fitted to its IoU on the same objects."""
BOX_SCORE = -0.074, 1.038
"""The same for a box, from the agreement of the network and GrabCut."""
MIN_CONTRAST = 1.0
"""Least standard deviation of the region's pixels: a plain picture has no objects."""


@functools.cache
def load() -> Any:
    """The session of this process. Raises MissingDependency without onnxruntime."""
    try:
        import onnxruntime
    except ImportError:
        raise MissingDependency("segment_object_at needs onnxruntime", fix="pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(WEIGHTS), options, providers=["CPUExecutionProvider"])


def segment(picture: np.ndarray, region: Edges, point: tuple[float, float] | None, box: Edges | None, seed: int = 0) -> Segment:
    """Segment the object at a point or in a box (pixels of the picture) within ``region``.

    Raises OperationError ``nothing_found``, MissingDependency.
    """
    if box is not None:
        return _by_box(picture, box, seed)
    assert point is not None
    maps, features = describe(picture, region, point, seed)
    scores = features @ np.array(WEIGHTS_OF_CHOICE) + OFFSET
    best = int(np.argmax(scores))
    inside, place = maps[best]
    return Segment(_outline(picture, place, inside, point), _calibrated(float(scores[best])), "mobilenet")


def describe(
    picture: np.ndarray, region: Edges, point: tuple[float, float], seed: int
) -> tuple[list[tuple[np.ndarray, Edges]], np.ndarray]:
    """The network's masks of both looks and the classical proposals, each with its region, and their features [n, 5].

    The features: overlap with the mean of the network's masks, agreement with the other proposals, share of the outline on the
    border, 1 for a proposal, and a proposal's agreement.
    """
    masks, scores = candidates(picture, region, point, None)
    maps = [(mask, region) for mask in masks]
    nearer = _surroundings(masks[int(np.argmax(scores))], region)
    if nearer is not None:
        maps += [(mask, nearer) for mask in candidates(picture, nearer, point, None)[0]]
    left, top, right, bottom = region
    small = shrink(picture[top:bottom, left:right], grabcut.WORK)
    height, width = small.shape[:2]
    at = (
        min(int((point[0] - left) * width / (right - left)), width - 1),
        min(int((point[1] - top) * height / (bottom - top)), height - 1),
    )
    mean = np.mean([_thumb(_placed(mask, place, region)) for mask, place in maps], 0)
    count = len(maps)
    maps += [(proposal.astype(np.float32), region) for proposal in grabcut.proposals(small, at, seed)]
    hard = np.stack([_thumb((_placed(mask, place, region) > 0.5).astype(np.float32)) for mask, place in maps])
    overlap = np.minimum(hard, mean).sum(1) / (np.maximum(hard, mean).sum(1) + 1e-6)
    proposed, classical = hard[count:], np.arange(len(maps)) >= count
    dice = 2 * (hard @ proposed.T) / (hard.sum(1)[:, None] + proposed.sum(1)[None] + 1e-6)
    agreement = (dice.sum(1) - classical) / np.maximum(1, len(proposed) - classical)
    border = [grabcut.on_border(mask.reshape(THUMB, THUMB) > 0.5) for mask in hard]
    return maps, np.stack([overlap, agreement, np.array(border), classical, classical * agreement], 1)


def _by_box(picture: np.ndarray, box: Edges, seed: int) -> Segment:
    region = _around(box, (picture.shape[0], picture.shape[1]), 0.35)
    inside, agreement = cut_box(picture, box, region, seed)
    if not inside.any():
        raise OperationError("no object in the box differs from its surroundings: give another box", code="nothing_found")
    score = float(np.clip(BOX_SCORE[0] + BOX_SCORE[1] * agreement, 0.0, 0.95))
    return Segment(_outline(picture, region, inside.astype(np.float32), None), round(score, 3), "mobilenet")


def cut_box(picture: np.ndarray, box: Edges, region: Edges, seed: int) -> tuple[np.ndarray, float]:
    """The object of a box, bool [h, w] over ``region``: GrabCut from the network's map; and how far the two agree."""
    left, top, right, bottom = region
    small = shrink(picture[top:bottom, left:right], grabcut.WORK)
    height, width = small.shape[:2]
    mean = cv2.resize(candidates(picture, region, None, box)[0].mean(0), (width, height), interpolation=cv2.INTER_LINEAR)
    across, down = width / (right - left), height / (bottom - top)
    allowed = np.zeros((height, width), bool)
    x0, y0 = round((box[0] - left) * across), round((box[1] - top) * down)
    allowed[y0 : max(y0 + 1, round((box[3] - top) * down)), x0 : max(x0 + 1, round((box[2] - left) * across))] = True
    inside = grabcut.refine(small, mean, allowed, seed)
    if grabcut.contrast(inside, cv2.cvtColor(small, cv2.COLOR_RGB2LAB)) < grabcut.MIN_CONTRAST:
        inside[:] = False
    network = (mean > 0.5) & allowed
    return inside, float((inside & network).sum()) / max(1.0, float((inside | network).sum()))


def _calibrated(score: float) -> float:
    return round(float(np.clip(CALIBRATION[0] + CALIBRATION[1] * score, 0.0, 0.95)), 3)


def _surroundings(mask: np.ndarray, region: Edges) -> Edges | None:
    """The region of the second look; None if the object fills much of the first."""
    left, top, right, bottom = region
    x, y, w, h = cv2.boundingRect((mask > 0.5).astype(np.uint8))
    if not (w and h):
        return None
    across, down = (right - left) / mask.shape[1], (bottom - top) / mask.shape[0]
    found = round(left + x * across), round(top + y * down), round(left + (x + w) * across), round(top + (y + h) * down)
    near = _around(found, (bottom, right), MARGIN)
    near = max(near[0], left), max(near[1], top), near[2], near[3]
    large = max((near[2] - near[0]) / (right - left), (near[3] - near[1]) / (bottom - top)) >= WORTHWHILE
    return None if large else near


def _placed(mask: np.ndarray, place: Edges, region: Edges) -> np.ndarray:
    """A mask of ``place`` as a map of ``region``, float32 [128, 128]."""
    if place == region:
        return mask
    size = mask.shape[0]
    full = np.zeros((size, size), np.float32)
    across, down = size / (region[2] - region[0]), size / (region[3] - region[1])
    x0, y0 = int((place[0] - region[0]) * across), int((place[1] - region[1]) * down)
    x1, y1 = max(x0 + 1, round((place[2] - region[0]) * across)), max(y0 + 1, round((place[3] - region[1]) * down))
    full[y0:y1, x0:x1] = cv2.resize(mask, (x1 - x0, y1 - y0), interpolation=cv2.INTER_AREA)[: size - y0, : size - x0]
    return full


def _thumb(mask: np.ndarray) -> np.ndarray:
    return cv2.resize(mask, (THUMB, THUMB), interpolation=cv2.INTER_AREA).ravel()


def candidates(
    picture: np.ndarray, region: Edges, point: tuple[float, float] | None, box: Edges | None
) -> tuple[np.ndarray, np.ndarray]:
    """All masks of a region: probabilities float32 [n, SIDE / 2, SIDE / 2], and the expected IoU of each."""
    left, top, right, bottom = region
    part = picture[top:bottom, left:right]
    if part.std() < MIN_CONTRAST:
        raise OperationError("no object differs from its surroundings here: move the point or the box", code="nothing_found")
    kind = cv2.INTER_AREA if min(part.shape[:2]) > SIDE else cv2.INTER_LINEAR
    square = cv2.resize(part, (SIDE, SIDE), interpolation=kind).astype(np.float32)
    across, down = SIDE / (right - left), SIDE / (bottom - top)
    spot = None if point is None else ((point[0] - left) * across, (point[1] - top) * down)
    edges = box and ((box[0] - left) * across, (box[1] - top) * down, (box[2] - left) * across, (box[3] - top) * down)
    inputs = {"picture": square[None], "prompt": prompt(SIDE, spot, edges)[None]}
    masks, scores = load().run(None, inputs)
    return masks[0], scores[0]


def _around(box: Edges, size: tuple[int, int], margin: float) -> Edges:
    """The box and its surroundings within a picture of ``size`` (height, width)."""
    left, top, right, bottom = box
    across, down = max(4, round(margin * (right - left))), max(4, round(margin * (bottom - top)))
    return max(0, left - across), max(0, top - down), min(size[1], right + across), min(size[0], bottom + down)


def _outline(picture: np.ndarray, region: Edges, inside: np.ndarray, point: tuple[float, float] | None) -> Mask:
    """The mask in the picture: probabilities refined along the picture's edges, and the piece at the point or the largest.

    Raises OperationError ``nothing_found``.
    """
    left, top, right, bottom = region
    guide = shrink(picture[top:bottom, left:right], REFINE)
    soft = cv2.resize(inside, guide.shape[1::-1], interpolation=cv2.INTER_LINEAR)
    soft = cv2.ximgproc.guidedFilter(guide, soft, max(1, round(2 * max(guide.shape[:2]) / SIDE)), 60.0)
    full = cv2.resize(soft, (right - left, bottom - top), interpolation=cv2.INTER_LINEAR) > 0.5
    count, parts, statistics, _ = cv2.connectedComponentsWithStats(full.astype(np.uint8), connectivity=4)
    if count == 1:
        raise OperationError("no distinct object at this point: move the point or give a box", code="nothing_found")
    if count > 2:
        piece = 1 + int(np.argmax(statistics[1:, cv2.CC_STAT_AREA]))
        if point is not None:
            x, y = min(int(point[0]) - left, right - left - 1), min(int(point[1]) - top, bottom - top - 1)
            piece = int(parts[y, x]) or piece
        full = parts == piece
    return Mask.of(full, left, top, *picture.shape[:2])


def prompt(side: int, point: tuple[float, float] | None, box: tuple[float, float, float, float] | None) -> np.ndarray:
    """The network's map of a point or a box (pixels of a square of ``side``): float32 [3, side / 4, side / 4].

    The first channel says where the object certainly is, the second where it is likely, the third is the interior of the box.
    """
    size = side // 4
    x, y = np.meshgrid(np.arange(size, dtype=np.float32) + 0.5, np.arange(size, dtype=np.float32) + 0.5)
    inside = np.zeros((size, size), np.float32)
    if box is None:
        assert point is not None
        centre, certain, likely = (point[0] / 4, point[1] / 4), (0.02 * size, 0.02 * size), (0.12 * size, 0.12 * size)
    else:
        left, top, right, bottom = (value / 4 for value in box)
        centre = (left + right) / 2, (top + bottom) / 2
        certain = max(0.8, 0.15 * (right - left)), max(0.8, 0.15 * (bottom - top))
        likely = 2 * certain[0], 2 * certain[1]
        inside = np.clip(np.minimum(x - left, right - x) + 0.5, 0, 1) * np.clip(np.minimum(y - top, bottom - y) + 0.5, 0, 1)
    maps = [np.exp(-0.5 * (((x - centre[0]) / a) ** 2 + ((y - centre[1]) / b) ** 2)) for a, b in (certain, likely)]
    return np.stack([*maps, inside]).astype(np.float32)
