"""Objects with published masks, from folders that the user gives, and which of them may be used for building.

The split was fixed before the packaged segmenter was built. HELD OUT, never used to train or to choose
anything: the pictures of BSDS500's ``test`` folder, and every second picture (odd positions in the order of
names) of COCO128. For building: BSDS500's ``train`` and ``val`` folders (to choose among designs and to
calibrate the score, not to train) and the other half of COCO128.

- BSDS500 (Arbelaez et al. 2011; non-commercial research): a folder with ``images/SPLIT/*.jpg`` and
  ``groundTruth/SPLIT/*.mat``.
- COCO128 (the first 128 pictures of COCO train2017; annotations CC BY 4.0): a folder with
  ``images/train2017/*.jpg`` and
  ``labels/train2017/*.txt``, each line a class and a polygon in 0..1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from scipy import ndimage
from scipy.io import loadmat

from benchmarks.operation_datasets import Outlined
from pixelis.operations.image import load_image

AREA = 0.01, 0.6
"""Least and largest share of the picture that an object covers."""
AGREEMENT, ON_BORDER = 0.8, 0.1
"""BSDS: least IoU with a segment of another annotator, and the largest share of the outline on the picture's
border.
"""


def bsds(folder: Path, split: str, limit: int) -> list[Outlined]:
    """Return at most one object of each picture: the largest segment on which two annotators agree and that
    is no background.
    """
    objects: list[Outlined] = []
    for path in sorted((folder / "images" / split).glob("*.jpg")):
        if len(objects) == limit:
            break
        truth = loadmat(folder / "groundTruth" / split / f"{path.stem}.mat")["groundTruth"].ravel()
        maps = [entry[0, 0]["Segmentation"].astype(np.int32) for entry in truth]
        agreed = [mask for mask in _agreed(maps) if AREA[0] <= mask.mean() <= 0.4]
        if agreed:
            picture = load_image(path, 10**9, 10**9)
            objects.append(_object(f"bsds {path.stem}", picture, max(agreed, key=np.count_nonzero)))
    return objects


def _agreed(maps: list[np.ndarray]) -> Iterator[np.ndarray]:
    for i, segments in enumerate(maps):
        for label in range(1, segments.max() + 1):
            mask = segments == label
            if not mask.any() or _on_border(mask) > ON_BORDER:
                continue
            for j, other in enumerate(maps):
                if j != i and np.count_nonzero(mask):
                    best = other == np.bincount(other[mask]).argmax()
                    if np.count_nonzero(mask & best) >= AGREEMENT * np.count_nonzero(mask | best):
                        yield mask
                        break


def _on_border(mask: np.ndarray) -> float:
    border = sum(int(line.sum()) for line in (mask[0], mask[-1], mask[:, 0], mask[:, -1]))
    outline = int((mask & ~ndimage.binary_erosion(mask, border_value=1)).sum())
    return border / max(1, border + outline)


def coco(folder: Path, odd: bool, per_picture: int = 2) -> list[Outlined]:
    """Return the largest ``per_picture`` objects of each second picture."""
    objects = []
    for path in sorted((folder / "images" / "train2017").glob("*.jpg"))[int(odd) :: 2]:
        picture = load_image(path, 10**9, 10**9)
        masks = polygons(folder / "labels" / "train2017" / f"{path.stem}.txt", picture.shape[:2])
        masks = [mask for mask in masks if AREA[0] <= mask.mean() <= AREA[1]]
        for number, mask in enumerate(sorted(masks, key=np.count_nonzero, reverse=True)[:per_picture]):
            objects.append(_object(f"coco {path.stem} {number}", picture, mask))
    return objects


def polygons(path: Path, size: tuple[int, int]) -> list[np.ndarray]:
    """Return the mask of each line, bool [H, W]; none for a missing file."""
    masks = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        points = np.array(line.split()[1:], np.float64).reshape(-1, 2) * size[::-1]
        mask = np.zeros(size, np.uint8)
        cv2.fillPoly(mask, [np.round(points).astype(np.int32)], 1)
        masks.append(mask > 0)
    return masks


def _object(name: str, picture: np.ndarray, mask: np.ndarray) -> Outlined:
    depth = cv2.distanceTransform(np.pad(mask.astype(np.uint8), 1), cv2.DIST_L2, 5)[1:-1, 1:-1]
    row, column = np.unravel_index(depth.argmax(), depth.shape)
    return Outlined(name, picture, mask, (int(column), int(row)))
