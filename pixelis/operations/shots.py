"""Hard cuts: where a frame shows another scene than the one before, judged from the frames alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import cv2
import numpy as np

WIDTH = 112
BLOCK, REACH = 16, 8
SIMILAR, EQUAL = 0.75, 6.0
"""Least correlation of a block with its best place before; without texture, the largest difference."""
FLAT = 4.0
CUT = 0.4
"""Cuts change 0.5 and more, a moving camera up to 0.25 (`benchmarks.operations heldout`)."""
FLASH = 3
SAME = 0.9
"""Least correlation of two frames of which one is the other in another light."""


def thumbnail(frame: np.ndarray) -> np.ndarray:
    """The copy of a frame (uint8 [H, W, 3]) that `change` compares: grey, float32 [h, WIDTH]."""
    height = max(BLOCK, round(frame.shape[0] * WIDTH / frame.shape[1]))
    small = cv2.resize(frame, (WIDTH, height), interpolation=cv2.INTER_AREA)
    return cv2.GaussianBlur(small.mean(2, dtype=np.float32), (0, 0), 0.8)


def change(before: np.ndarray, after: np.ndarray) -> float:
    """Share of ``after`` that is nowhere near its place in ``before`` (thumbnails of one size), 0..1.

    Where much is new, they are compared again after the shift that phase correlation finds, as of a fast pan.
    """
    before = _in_the_light_of(after, before)
    share = _new(before, after)
    if share < CUT / 2:
        return share
    (across, down), _ = cv2.phaseCorrelate(
        before, after, cv2.createHanningWindow(after.shape[::-1], cv2.CV_32F)
    )
    moved = np.array([[1, 0, across], [0, 1, down]], np.float32)
    return min(
        share, _new(cv2.warpAffine(before, moved, after.shape[::-1], borderMode=cv2.BORDER_REPLICATE), after)
    )


def _new(before: np.ndarray, after: np.ndarray) -> float:
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


def _in_the_light_of(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """``before`` in the brightness and contrast of ``after`` if both show the same."""
    spread, other = float(before.std()), float(after.std())
    covariance = float(((before - before.mean()) * (after - after.mean())).mean())
    if covariance < SAME * spread * other or not spread * other:
        return before
    return ((before - before.mean()) * np.float32(covariance / spread**2) + after.mean()).astype(np.float32)


def is_flash(
    before: np.ndarray, after: np.ndarray, earlier: Iterable[np.ndarray], later: Iterable[np.ndarray]
) -> bool:
    """Whether a change begins or ends a flash, by the thumbnails of up to FLASH frames on either side."""
    begins = any(change(before, frame) < CUT for frame in later)
    return begins or any(change(frame, after) < CUT for frame in earlier)


def mark_cuts(first: np.ndarray, frames: Iterator[np.ndarray]) -> Iterator[tuple[np.ndarray, bool]]:
    """Each of ``frames``, which follow ``first``, and whether a scene begins with it; reads FLASH ahead."""
    past = deque([thumbnail(first)], maxlen=FLASH + 1)
    ahead = deque((frame, thumbnail(frame)) for _, frame in zip(range(FLASH), frames, strict=False))
    while ahead:
        frame, now = ahead.popleft()
        if (following := next(frames, None)) is not None:
            ahead.append((following, thumbnail(following)))
        *earlier, before = past
        yield (
            frame,
            change(before, now) >= CUT and not is_flash(before, now, earlier, (later for _, later in ahead)),
        )
        past.append(now)
