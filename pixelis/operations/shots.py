"""Hard cuts: where a frame shows another scene than the one before, judged from the frames alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import cv2
import numpy as np

WIDTH = 112
"""Columns of the copies that are compared."""
BLOCK, REACH = 16, 8
"""Side of a block, and how far it may have moved from one frame to the next; 8 columns are 7 % of the frame's width."""
SIMILAR, EQUAL = 0.75, 6.0
"""Least correlation of a block with its best place in the frame before; without texture, the largest difference, of 255."""
FLAT = 4.0
CUT = 0.5
"""Least `change` of a cut. Cuts between similar photographs have 0.66 and more, a camera in motion up to 0.3."""


def thumbnail(frame: np.ndarray) -> np.ndarray:
    """The copy of a frame (uint8 [H, W, 3], RGB or BGR) that `change` compares: grey, float32 [h, WIDTH]."""
    height = max(BLOCK, round(frame.shape[0] * WIDTH / frame.shape[1]))
    small = cv2.resize(frame, (WIDTH, height), interpolation=cv2.INTER_AREA)
    return cv2.GaussianBlur(small.mean(2, dtype=np.float32), (0, 0), 0.8)


def change(before: np.ndarray, after: np.ndarray) -> float:
    """Share of ``after`` that is nowhere near its place in ``before`` (thumbnails of one size), 0..1.

    Moving objects and a moving camera leave most blocks recognisable a few columns further on; another scene does not.
    """
    height, width = after.shape
    padded = cv2.copyMakeBorder(before, REACH, REACH, REACH, REACH, cv2.BORDER_REPLICATE)
    new = count = 0
    for top in range(0, height - BLOCK + 1, BLOCK):
        for left in range(0, width - BLOCK + 1, BLOCK):
            block = after[top : top + BLOCK, left : left + BLOCK]
            search = padded[top : top + BLOCK + 2 * REACH, left : left + BLOCK + 2 * REACH]
            count += 1
            if block.std() < FLAT:
                squares = cv2.matchTemplate(search, block, cv2.TM_SQDIFF)
                new += float(np.sqrt(max(0.0, float(squares.min())) / block.size)) > EQUAL
            else:
                new += float(cv2.matchTemplate(search, block, cv2.TM_CCOEFF_NORMED).max()) < SIMILAR
    return new / max(1, count)


def mark_cuts(first: np.ndarray, frames: Iterator[np.ndarray]) -> Iterator[tuple[np.ndarray, bool]]:
    """Each of ``frames``, which follow ``first``, and whether a new scene begins with it.

    A flash is no cut: the scene before it must not be back in the frame after.
    """
    before = thumbnail(first)
    for frame, following in itertools.pairwise(itertools.chain(frames, (None,))):
        assert frame is not None
        now = thumbnail(frame)
        changed = change(before, now) >= CUT
        cut = changed and (following is None or change(before, thumbnail(following)) >= CUT)
        yield frame, cut
        before = before if changed and not cut else now
