"""Follows boxes through a clip with OpenCV's CSRT (Lukezic et al. 2017) and finds lost objects again.

CSRT rarely reports a failure, so each box is compared with the first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from pixelis.errors import MissingDependency, OperationError
from pixelis.operations import shots
from pixelis.operations.pixel_budget import shrink
from pixelis.operations.video import Clip

LONGEST = 640
SHORTEST_OBJECT = 24
CHUNK = 32
"""Frames decoded at once on the way back; decoders go forward only."""

THRESHOLD = 0.36
"""Least similarity of a box that shows the object: correct tracks stay above 0.42, wrong ones below 0.34."""
DROP = 0.5
"""The same as a share of the mean similarity so far."""
PATIENCE = 5
"""Frames below the threshold after which the object is lost; fewer are an occlusion."""
STRUCTURE = 3.0
"""Least contrast within a box (deviation of brightness, of 255, without slope and noise)."""
MIN_INSIDE = 0.55
CELL, STILL = 8, 2.0
"""Side of a cell in pixels; largest change of its mean (0..255) around a box that has not moved: codecs and sensors
change less."""

FOUND, FOUND_SHARE = 0.6, 0.76
"""Least similarity of an object that is found again; the same as a share of the mean so far."""
SEARCH_SIDE = 20.0
"""Side of the object, as a square, on the copy that is searched for it."""
SCALES = (0.76, 0.87, 1.0, 1.15, 1.32)
CANDIDATES = 6
"""Best places by correlation alone whose similarity is measured."""

PixelBox = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""


@dataclass(frozen=True)
class Track:
    """The frames that show the object, with its boxes in full-resolution pixels and similarities 0..1.

    ``cuts``: frames with which a new scene begins.
    """

    frames: list[int]
    boxes: list[PixelBox]
    scores: list[float]
    cuts: list[int]


def follow(clip: Clip, first: int, last: int, starts: Sequence[Sequence[float]]) -> list[Track]:
    """Track the boxes ``starts`` of frame ``first`` (in pixels) to ``last``, which may be earlier.

    OperationError ``nothing_found`` for an untrackable box.
    """
    numbers = list(range(first, last + 1)) if first <= last else list(range(first, last - 1, -1))
    side = max(clip.width, clip.height)
    shorter = min(min(edges[2] - edges[0], edges[3] - edges[1]) for edges in starts)
    pictures = _pictures(clip, numbers, max(LONGEST, SHORTEST_OBJECT * side / shorter))
    picture = next(pictures)
    across, down = picture.shape[1] / clip.width, picture.shape[0] / clip.height
    followers = []
    for number, edges in enumerate(starts, 1):
        try:
            followers.append(
                _Follower(picture, (edges[0] * across, edges[1] * down, edges[2] * across, edges[3] * down))
            )
        except OperationError as error:
            prefix = f"box {number}: " if len(starts) > 1 else ""
            raise OperationError(f"{prefix}{error.message}", code=error.code) from None
    cuts = []
    for index, (frame, cut) in enumerate(shots.mark_cuts(picture, pictures), 1):
        if cut:
            # Backward, the new scene begins with the frame that was seen before.
            cuts.append(max(numbers[index], numbers[index - 1]))
        for follower in followers:
            follower.update(index, frame, cut)
    step = 1 if first <= last else -1
    tracks = []
    for follower, edges in zip(followers, starts, strict=True):
        seen, boxes, scores = follower.close()
        full = [tuple(map(float, edges))] + [
            (x0 / across, y0 / down, x1 / across, y1 / down) for x0, y0, x1, y1 in boxes[1:]
        ]
        tracks.append(
            Track([numbers[index] for index in seen][::step], full[::step], scores[::step], cuts[::step])
        )
    return tracks


def _pictures(clip: Clip, numbers: list[int], longest: float) -> Iterator[np.ndarray]:
    """Shrunk copies of frames, BGR, in the order of ``numbers``, which may descend."""
    if numbers[0] <= numbers[-1]:
        for frame in clip.frames(numbers):
            yield cv2.cvtColor(shrink(frame, longest), cv2.COLOR_RGB2BGR)
        return
    for start in range(0, len(numbers), CHUNK):
        part = numbers[start : start + CHUNK]
        copies = [
            cv2.cvtColor(shrink(frame, longest), cv2.COLOR_RGB2BGR) for frame in clip.frames(part[::-1])
        ]
        yield from reversed(copies)


class _Follower:
    def __init__(self, picture: np.ndarray, start: PixelBox):
        try:
            self.appearance = _Appearance(picture, start)
            begun = self._begin(picture, start)
        except cv2.error:
            begun = False
        if not begun:
            raise OperationError("the box shows nothing that can be tracked", code="nothing_found")
        if self.appearance.structure < STRUCTURE:
            message = "the box shows an even area: give a box around something distinct"
            raise OperationError(message, code="nothing_found")
        self.seen, self.boxes, self.scores = [0], [start], [1.0]
        self.low, self.lost = 0, False
        self.threshold, self.recovery = THRESHOLD, FOUND
        self._remember(picture, start)

    def _begin(self, picture: np.ndarray, box: PixelBox) -> bool:
        left, top = round(box[0]), round(box[1])
        tracker = create_tracker()
        try:
            tracker.init(picture, (left, top, max(2, round(box[2]) - left), max(2, round(box[3]) - top)))
        except cv2.error:
            return False
        self.tracker = tracker
        return True

    def update(self, number: int, picture: np.ndarray, cut: bool) -> None:
        """Take in the next picture; ``cut``: it begins a new scene."""
        if self.lost:
            box, score = self.appearance.find(picture, self.boxes[-1])
            if score >= self.recovery and self._begin(picture, box):
                self._see(number, box, score)
                self._remember(picture, box)
            return
        if not cut and np.abs(_cells(picture, self.area) - self.cells).max() < STILL:
            self._see(number, self.boxes[-1], self.scores[-1])
        else:
            box, score = self._moved(picture)
            if cut and score < self.recovery:
                self._lose()
                return
            self._see(number, box, score)
            self._remember(picture, box)
        if self.low >= PATIENCE:
            self._lose()

    def _moved(self, picture: np.ndarray) -> tuple[PixelBox, float]:
        """The tracker's box in the next picture and its similarity; the last box and 0 where it fails."""
        try:
            ok, (x, y, width, height) = self.tracker.update(picture)
        except cv2.error:
            ok = False
        if not ok or width < 1 or height < 1:
            return self.boxes[-1], 0.0
        box = (float(x), float(y), float(x + width), float(y + height))
        return box, self.appearance.score(picture, box)

    def _remember(self, picture: np.ndarray, box: PixelBox) -> None:
        """Keep the surroundings of the box: while they stay the same, it does not move."""
        self.area = _around(box, picture)
        self.cells = _cells(picture, self.area)

    def _see(self, number: int, box: PixelBox, score: float) -> None:
        self.lost = False
        self.seen.append(number)
        self.boxes.append(box)
        self.scores.append(score)
        self.low = self.low + 1 if score < self.threshold else 0
        if not self.low:
            mean = float(np.mean(self.scores))
            self.threshold, self.recovery = max(THRESHOLD, DROP * mean), max(FOUND, FOUND_SHARE * mean)

    def _lose(self) -> None:
        """Take back the doubtful boxes but the first."""
        count = max(1, len(self.seen) - self.low)
        del self.seen[count:], self.boxes[count:], self.scores[count:]
        self.low, self.lost = 0, True

    def close(self) -> tuple[list[int], list[PixelBox], list[float]]:
        """Numbers of the pictures that show the object, its boxes and similarities."""
        # At the end of the range, three frames below the threshold are enough.
        if self.low > PATIENCE // 2:
            self._lose()
        return self.seen, self.boxes, self.scores


def _around(box: PixelBox, picture: np.ndarray) -> tuple[int, int, int, int]:
    """Edges of the box and half its size on each side, within the picture."""
    x0, y0, x1, y1 = box
    across, down = (x1 - x0) / 2, (y1 - y0) / 2
    height, width = picture.shape[:2]
    left, top = (
        int(min(max(edge, 0), most - 1)) for edge, most in ((x0 - across, width), (y0 - down, height))
    )
    right, bottom = int(min(x1 + across, width)), int(min(y1 + down, height))
    return left, top, max(right, left + 1), max(bottom, top + 1)


def _cells(picture: np.ndarray, area: tuple[int, int, int, int]) -> np.ndarray:
    """Means of the cells of an area, float32."""
    left, top, right, bottom = area
    size = -(-(right - left) // CELL), -(-(bottom - top) // CELL)
    return cv2.resize(picture[top:bottom, left:right], size, interpolation=cv2.INTER_AREA).astype(np.float32)


def create_tracker() -> Any:
    """A new CSRT tracker of OpenCV. Raises MissingDependency when OpenCV comes without it."""
    if not hasattr(cv2, "TrackerCSRT"):  # another wheel of OpenCV took the place of ours
        raise MissingDependency(
            "track_object needs OpenCV with its contributed trackers",
            fix="pip install --force-reinstall --no-deps opencv-contrib-python-headless",
        )
    return cv2.TrackerCSRT.create()


class _Appearance:
    """Similarity of a box to the object, by colour and pattern, against the first frame and a slow average.

    Colours are compared as Lab histograms (Bhattacharyya), patterns by normalised correlation, in the ellipse
    within the box. Only confident frames update the average, so that it does not learn an occluder.
    """

    SIDE, SHIFT, RATE, SURE = 32, 4, 0.05, 0.5
    ELLIPSE = cv2.ellipse(
        np.zeros((SIDE, SIDE), np.uint8), ((SIDE / 2 - 0.5, SIDE / 2 - 0.5), (SIDE, SIDE), 0), 1, -1
    )
    WEIGHTS = ELLIPSE.astype(np.float32)

    def __init__(self, picture: np.ndarray, box: PixelBox):
        pattern = self._patch(picture, box)[self.SHIFT : -self.SHIFT, self.SHIFT : -self.SHIFT]
        colours = self._colours(pattern)
        self._references = [(pattern, colours), (pattern.copy(), colours.copy())]
        grey = self._patch(picture, box).mean(2)
        axis = np.arange(len(grey)) - (len(grey) - 1) / 2
        across, down = ((grey * part).mean() / axis.var() for part in (axis, axis[:, None]))
        even = grey.mean() + across * axis + down * axis[:, None]
        self.structure = float(cv2.GaussianBlur(grey - even, (0, 0), 1.5).std())

    def score(self, picture: np.ndarray, box: PixelBox) -> float:
        """Similarity 0..1, which the average learns from; 0 for a box mostly outside the frame."""
        height, width = picture.shape[:2]
        x0, y0, x1, y1 = box
        shown = max(0.0, min(x1, width) - max(x0, 0)) * max(0.0, min(y1, height) - max(y0, 0))
        if shown / ((x1 - x0) * (y1 - y0)) < MIN_INSIDE:
            return 0.0
        score, pattern, colours = self._compare(picture, box)
        if score >= self.SURE:
            mean, histogram = self._references[1]
            self._references[1] = (
                mean + self.RATE * (pattern - mean),
                histogram + self.RATE * (colours - histogram),
            )
        return round(score, 4)

    def find(self, picture: np.ndarray, last: PixelBox) -> tuple[PixelBox, float]:
        """The box of about the size of ``last`` that is most similar to the object, and its similarity."""
        width, height = last[2] - last[0], last[3] - last[1]
        ratio = min(1.0, SEARCH_SIDE / math.sqrt(width * height))
        size = max(1, round(picture.shape[1] * ratio)), max(1, round(picture.shape[0] * ratio))
        # Grey is six times as fast as colour, which is compared later.
        small = cv2.cvtColor(cv2.resize(picture, size, interpolation=cv2.INTER_AREA), cv2.COLOR_BGR2GRAY)
        places: list[tuple[float, PixelBox]] = []
        for pattern, _ in self._references:
            grey = cv2.cvtColor(pattern.clip(0, 255).astype(np.uint8), cv2.COLOR_BGR2GRAY)
            for scale in SCALES:
                w, h = max(4, round(width * scale * ratio)), max(4, round(height * scale * ratio))
                if w >= size[0] or h >= size[1]:
                    continue
                template = cv2.resize(grey, (w, h), interpolation=cv2.INTER_AREA)
                weights = cv2.resize(self.WEIGHTS, (w, h), interpolation=cv2.INTER_AREA)
                match = cv2.matchTemplate(small, template, cv2.TM_CCOEFF_NORMED, mask=weights)
                # Even places have no correlation.
                _, value, _, (x, y) = cv2.minMaxLoc(np.where(np.isfinite(match), match, -1))
                middle_x, middle_y = (x + w / 2) / ratio, (y + h / 2) / ratio
                dx, dy = width * scale / 2, height * scale / 2
                places.append((value, (middle_x - dx, middle_y - dy, middle_x + dx, middle_y + dy)))
        places = sorted((place for place in places if math.isfinite(place[0])), reverse=True)[:CANDIDATES]
        best = max(((self._compare(picture, box)[0], box) for _, box in places), default=(0.0, last))
        return best[1], round(best[0], 4)

    def _compare(self, picture: np.ndarray, box: PixelBox) -> tuple[float, np.ndarray, np.ndarray]:
        patch = self._patch(picture, box)
        pattern = np.ascontiguousarray(patch[self.SHIFT : -self.SHIFT, self.SHIFT : -self.SHIFT])
        colours = self._colours(pattern)
        scores = []
        for reference, histogram in self._references:
            match = cv2.matchTemplate(
                patch, np.ascontiguousarray(reference), cv2.TM_CCOEFF_NORMED, mask=self.WEIGHTS
            ).max()
            colour = 1 - math.sqrt(max(0.0, 1 - float(np.sqrt(colours * histogram).sum())))
            # A plain object has no pattern to correlate: use the colours alone.
            plain = reference.std() < 2 or not math.isfinite(match)
            scores.append(colour if plain else 0.5 * colour + 0.5 * min(1.0, max(0.0, float(match))))
        return max(scores), pattern, colours

    def _patch(self, picture: np.ndarray, box: PixelBox) -> np.ndarray:
        """The box as float32 [SIDE + 2 SHIFT, SIDE + 2 SHIFT, 3], BGR, with a margin of SHIFT."""
        x0, y0, x1, y1 = box
        height, width = picture.shape[:2]
        more_x, more_y = (x1 - x0) * 0.2 + 1, (y1 - y0) * 0.2 + 1
        left, top = max(0, math.floor(x0 - more_x)), max(0, math.floor(y0 - more_y))
        part = picture[top : min(height, math.ceil(y1 + more_y)), left : min(width, math.ceil(x1 + more_x))]
        across, down = self.SIDE / (x1 - x0), self.SIDE / (y1 - y0)
        # Against aliasing when the box is scaled down.
        part = cv2.blur(part, (max(1, round(1 / across)), max(1, round(1 / down))))
        shift_x, shift_y = (left - x0) * across + self.SHIFT, (top - y0) * down + self.SHIFT
        matrix = np.array([[across, 0, shift_x], [0, down, shift_y]], np.float32)
        side = self.SIDE + 2 * self.SHIFT
        return cv2.warpAffine(part, matrix, (side, side), borderMode=cv2.BORDER_CONSTANT).astype(np.float32)

    def _colours(self, pattern: np.ndarray) -> np.ndarray:
        lab = cv2.cvtColor(np.ascontiguousarray(pattern).astype(np.uint8), cv2.COLOR_BGR2Lab)
        histogram = cv2.calcHist([lab], [0, 1, 2], self.ELLIPSE, [6, 12, 12], [0, 256, 64, 192, 64, 192])
        return histogram / max(1.0, float(histogram.sum()))
