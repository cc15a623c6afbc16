"""Fit the numbers with which `pixelis/operations/mobilenet.py` chooses among masks and predicts their IoU; prints them.

    PYTHONPATH=. python scripts/fit_segmenter.py --bsds BSDS500/data

Uses one object of each picture of BSDS500's ``val`` folder and of 100 of ``train``, never ``test``, and packaged objects: coins,
drawings, hand outlines and cut-outs. Five minutes of one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np

from benchmarks import operation_datasets as sets
from benchmarks import operation_published as published
from pixelis.errors import OperationError
from pixelis.operations import mobilenet

PENALTY = 0.05
"""Of the ridge regression, for standardised features."""


def truth_of(mask: np.ndarray, frame: mobilenet.Edges) -> np.ndarray:
    """A mask, bool [H, W], in the size of the network's maps of ``frame``."""
    left, top, right, bottom = frame
    size = mobilenet.SIDE // 2
    return cv2.resize(mask[top:bottom, left:right].astype(np.float32), (size, size), interpolation=cv2.INTER_AREA) > 0.5


def full_mask(probabilities: np.ndarray, place: mobilenet.Edges, shape: tuple[int, ...]) -> np.ndarray:
    """A map of ``place`` as a mask of the picture, bool [H, W]."""
    left, top, right, bottom = place
    full = np.zeros(shape, bool)
    full[top:bottom, left:right] = cv2.resize(probabilities, (right - left, bottom - top)) > 0.5
    return full


def iou(a: np.ndarray, b: np.ndarray) -> float:
    """Of two bool masks."""
    return float((a & b).sum() / max(1, (a | b).sum()))


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bsds", type=Path, required=True, help="BSDS500's data folder: images, groundTruth")
    args = parser.parse_args()
    cv2.setNumThreads(1)
    features, overlaps, weights, copies, boxes = [], [], [], [], []
    packaged = sets.coins()[::2] + sets.vqa(10) + sets.outlined(sets.IN_SAMPLE, None) + sets.composites()[::3]
    for item in published.bsds(args.bsds, "val", 100) + published.bsds(args.bsds, "train", 100) + packaged:
        height, width = item.mask.shape
        whole = (0, 0, width, height)
        true = truth_of(item.mask, whole)
        try:
            maps, thumbs, described = mobilenet.describe(item.picture, whole, (item.point[0] + 0.5, item.point[1] + 0.5), 0)
            frame = mobilenet.around(item.box, item.mask.shape, mobilenet.BOX_MARGIN)
            box_map, level, expected = mobilenet.cut_box(item.picture, item.box, frame, 0)
        except OperationError:
            continue
        features.append(described)
        overlaps.append([iou(full_mask(mask, place, item.mask.shape), item.mask) for mask, place in maps])
        weights.append(np.full(len(maps), 1 / len(maps)))
        copies.append((thumbs, true))
        small = cv2.resize((box_map > level).astype(np.float32), true.shape, interpolation=cv2.INTER_AREA) > 0.5
        boxes.append((expected, iou(small, truth_of(item.mask, frame))))
    x, y, w = np.concatenate(features), np.concatenate(overlaps), np.concatenate(weights)
    mean, spread = x.mean(0), x.std(0)
    z = np.c_[(x - mean) / spread, np.ones(len(x))]
    fitted = np.linalg.solve((z * w[:, None]).T @ z + PENALTY * np.eye(z.shape[1]), (z * w[:, None]).T @ y)[:-1] / spread
    pairs = []
    for described, (thumbs, true) in zip(features, copies, strict=True):
        mean_map = mobilenet.weights_of(described @ fitted) @ thumbs
        level, expected = mobilenet.best_level(mean_map)
        side = mobilenet.THUMB
        pairs.append((expected, iou(mean_map.reshape(side, side) > level, cv2.resize(true.astype(np.uint8), (side, side)) > 0)))
    print("WEIGHTS_OF_CHOICE =", tuple(fitted.round(3).tolist()))
    for name, points in (("CALIBRATION", pairs), ("BOX_CALIBRATION", boxes)):
        predicted, reached = np.array(points).T
        slope, offset = np.polyfit(predicted, reached, 1)
        fit = f"mean IoU {reached.mean():.3f}, correlation {np.corrcoef(predicted, reached)[0, 1]:.3f}"
        print(f"{name} = {offset:.3f}, {slope:.3f}  # {len(points)} objects: {fit}")


if __name__ == "__main__":
    main()
