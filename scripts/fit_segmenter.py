"""Fit the numbers with which `pixelis/operations/mobilenet.py` chooses among masks and predicts their IoU;
prints them.

    PYTHONPATH=. python scripts/fit_segmenter.py --bsds BSDS500/data --coco coco128

Uses one object of each picture of BSDS500's ``val`` folder and of 100 of ``train``, never ``test``; up to two
of each picture of the half of COCO128 that is for building; and packaged objects: coins, drawings, hand
outlines and cut-outs. Five minutes of one core.
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

PENALTY, SCORE_PENALTY = 0.05, 1.0
"""Of the ridge regressions to the IoU of each mask and of the averaged mask, for standardised features."""
PACKAGED = 3.0
"""Weight of a packaged object against one on a published photograph, of which there are many more."""


def truth_of(mask: np.ndarray, frame: mobilenet.Edges) -> np.ndarray:
    """A mask, bool [H, W], in the size of the network's maps of ``frame``."""
    left, top, right, bottom = frame
    size = mobilenet.SIDE // 2
    return (
        cv2.resize(
            mask[top:bottom, left:right].astype(np.float32), (size, size), interpolation=cv2.INTER_AREA
        )
        > 0.5
    )


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bsds", type=Path, required=True, help="BSDS500's data folder: images, groundTruth")
    parser.add_argument(
        "--coco", type=Path, required=True, help="COCO128 with polygons: images/train2017, labels/train2017"
    )
    args = parser.parse_args()
    cv2.setNumThreads(1)
    described, overlaps, weights, averaged, boxes = [], [], [], [], []
    packaged = sets.coins()[::2] + sets.vqa(10) + sets.outlined(sets.IN_SAMPLE, None) + sets.composites()[::3]
    photographs = published.bsds(args.bsds, "val", 100) + published.bsds(args.bsds, "train", 100)
    photographs += published.coco(args.coco, odd=False)
    for number, item in enumerate(photographs + packaged):
        height, width = item.mask.shape
        whole = (0, 0, width, height)
        true = truth_of(item.mask, whole)
        try:
            maps, thumbs, features = mobilenet.describe(
                item.picture, whole, (item.point[0] + 0.5, item.point[1] + 0.5), 0
            )
            frame = mobilenet.around(item.box, item.mask.shape, mobilenet.BOX_MARGIN)
            box_map, level, signs = mobilenet.cut_box(item.picture, item.box, frame, 0)
        except OperationError:
            continue
        described.append(features)
        overlaps.append([iou(full_mask(mask, place, item.mask.shape), item.mask) for mask, place in maps])
        weights.append(np.full(len(maps), (1.0 if number < len(photographs) else PACKAGED) / len(maps)))
        averaged.append((thumbs, true))
        small = (
            cv2.resize((box_map > level).astype(np.float32), true.shape, interpolation=cv2.INTER_AREA) > 0.5
        )
        boxes.append((signs, iou(small, truth_of(item.mask, frame))))
    choice, _ = ridge(np.concatenate(described), np.concatenate(overlaps), np.concatenate(weights), PENALTY)
    points = []
    for features, (thumbs, true) in zip(described, averaged, strict=True):
        shares = mobilenet.weights_of(features @ choice.round(3))
        level, signs = mobilenet.certainty(thumbs, shares, features[:, -1])
        side = mobilenet.THUMB
        mask = (shares @ thumbs > level).reshape(side, side)
        points.append((signs, iou(mask, cv2.resize(true.astype(np.uint8), (side, side)) > 0)))
    print("WEIGHTS_OF_CHOICE =", tuple(choice.round(3).tolist()))
    for name, pairs in (("CALIBRATION", points), ("BOX_CALIBRATION", boxes)):
        x, y = np.stack([signs for signs, _ in pairs]), np.array([reached for _, reached in pairs])
        slopes, offset = ridge(x, y, np.ones(len(y)), SCORE_PENALTY)
        fit = f"mean IoU {y.mean():.3f}, correlation {np.corrcoef(x @ slopes, y)[0, 1]:.3f}"
        print(f"{name} = {(round(offset, 3), *slopes.round(3).tolist())}  # {len(y)} objects: {fit}")


def ridge(x: np.ndarray, y: np.ndarray, weights: np.ndarray, penalty: float) -> tuple[np.ndarray, float]:
    """The slopes and the offset of a weighted linear regression."""
    mean, spread = x.mean(0), x.std(0) + 1e-9
    z = np.c_[(x - mean) / spread, np.ones(len(x))]
    solution = np.linalg.solve(
        (z * weights[:, None]).T @ z + penalty * np.eye(z.shape[1]), (z * weights[:, None]).T @ y
    )
    slopes = solution[:-1] / spread
    return slopes, float(solution[-1] - slopes @ mean)


if __name__ == "__main__":
    main()
