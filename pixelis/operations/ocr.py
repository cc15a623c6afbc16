"""Detects and recognises text in an array with rapidocr.

Large pictures are searched twice: scaled down for large letters, then in tiles at (nearly) full size where
there is fine detail. The tiles' probabilities form one map, so a line across tiles stays one line. Lines are
recognised from full-size pixels.
"""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from pixelis.errors import MissingDependency

NAME = "rapidocr PP-OCRv6 small"
MODELS = {"Det": "PP-OCRv6_det_small.onnx", "Rec": "PP-OCRv6_rec_small.onnx"}

COARSE_PIXELS = 2_000_000
"""Size of the scaled-down picture for detection; about 0.8 s on one core."""
FINE_PIXELS = 10_000_000
"""Largest size of a picture for the detection of small text."""
FINE_BUDGET = 4_000_000
"""Most pixels of it that are searched; about 1.6 s."""
HINT = 0.1
"""Probability in the scaled-down picture from which a place is searched first at full size."""
SMALL_PIXELS = 400_000
MAX_UPSCALE = 3.0
TILE, OVERLAP = 512, 64
STRIP_HEIGHT = 48
MANY_LINES = 40
"""Above this number of lines the recogniser pads to half its width: half the time, slightly lower
confidence."""
STRIP_BUDGET = 120_000
"""Most pixels of total line length that are recognised, at STRIP_HEIGHT; about 9 s."""
MAX_RATIO = 150
"""Longest line that is recognised, in line heights; longer ones are rules. About 1.6 s."""
TRUSTED_HEIGHT = 14
"""Text of this height in the scaled-down picture is not searched again at full size."""
MIN_CONFIDENCE, MIN_SHORT, MIN_SYMBOL = 0.55, 0.8, 0.95
"""Least confidence of lines with three or more letters, with one or two, and with none."""
RETRY_TURNED = 0.85
"""A line with less confidence is also read upside down."""
SHORT, CERTAIN, STABLE = 4, 0.98, 0.8
"""Lines of up to SHORT letters below CERTAIN must read the same when cut tighter and wider, with the mean
confidence STABLE."""
SURE = 0.93
"""Least confidence of a line that is never dropped."""
NUDGE = 0.06
"""How much tighter and wider, in line heights."""


@dataclass(slots=True)
class Line:
    """A line of text. ``quad``: float [4, 2], corners in pixels, clockwise from the start of the text.

    ``positions`` (0..1 along the line) and ``confidences`` are of the characters without spaces.
    """

    text: str
    confidence: float
    quad: np.ndarray
    positions: list[float]
    confidences: list[float]


@cache
def engine() -> Engine:
    """The engine of this process, loaded on first use (about a second). Raises MissingDependency."""
    return Engine()


def model_files() -> dict[str, Path]:
    """Paths of the packaged models: rapidocr would download missing ones. Raises MissingDependency."""
    package = Path(str(find_spec("rapidocr").origin)).parent  # type: ignore[union-attr]
    paths = {part: package / "models" / name for part, name in MODELS.items()}
    for path in paths.values():
        if not path.is_file():
            raise MissingDependency(
                f"the installed rapidocr lacks the model {path.name}",
                fix="pip install --force-reinstall 'rapidocr>=3.10,<3.11'",
            )
    return paths


class Engine:
    """Detector and recogniser on one CPU thread, with the model files of the package; never downloads."""

    def __init__(self) -> None:
        paths = model_files()
        import rapidocr

        logging.getLogger("RapidOCR").setLevel(logging.CRITICAL)
        threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
        files = {f"{part}.model_path": str(path) for part, path in paths.items()}
        loaded = rapidocr.RapidOCR(params={"Global.log_level": "critical", **threads, **files})
        blank = np.zeros((STRIP_HEIGHT, STRIP_HEIGHT, 3), np.uint8)
        # A model is loaded by the first call that needs it.
        loaded(blank, use_det=True, use_cls=False, use_rec=False)
        loaded(blank, use_det=False, use_cls=False, use_rec=True)
        self._detector: Any = loaded.text_det
        self._recogniser: Any = loaded.text_rec

    def find(self, picture: np.ndarray) -> np.ndarray:
        """Detect text: quads float32 [n, 4, 2] in pixels of ``picture`` (uint8 [H, W, 3], BGR)."""
        height, width = picture.shape[:2]
        area = height * width
        scale = min(math.sqrt(COARSE_PIXELS / area), 1.0)
        if area < SMALL_PIXELS:
            scale = min(math.sqrt(SMALL_PIXELS / area), MAX_UPSCALE)
        probabilities = self._map(_resized(picture, scale))
        coarse = self._quads(probabilities, picture.shape[:2])
        fine_scale = min(1.0, math.sqrt(FINE_PIXELS / area))
        if fine_scale < 1.25 * scale:
            return coarse
        large = [quad for quad in coarse if thickness(quad) * scale >= TRUSTED_HEIGHT]
        image = _resized(picture, fine_scale)
        # Small letters may be where scaling down loses contrast.
        grey = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
        less = cv2.resize(
            _resized(grey, scale / fine_scale), image.shape[1::-1], interpolation=cv2.INTER_LINEAR
        )
        detail = cv2.boxFilter((cv2.absdiff(grey, less) > 12).astype(np.float32), -1, (24, 24)) > 0.06
        for quad in large:
            x0, y0 = np.maximum(quad.min(0) * fine_scale, 0).astype(int)
            x1, y1 = np.ceil(quad.max(0) * fine_scale).astype(int)
            detail[y0:y1, x0:x1] = False
        fine = self._quads(self._searched(image, detail, probabilities), picture.shape[:2])
        small = [quad for quad in coarse if thickness(quad) * scale < TRUSTED_HEIGHT]
        # At full size large letters are cut at tile edges: drop detections that overlap a line of the
        # scaled-down picture.
        extra = [
            quad
            for quad in fine
            if _covered(quad, large) < 0.5 and all(_covered(line, [quad]) < 0.5 for line in large)
        ]
        extra += [quad for quad in small if _covered(quad, extra) < 0.5]
        return np.array([*large, *extra], np.float32).reshape(-1, 4, 2)

    def read(
        self, picture: np.ndarray, quads: np.ndarray, min_confidence: float = 0.0
    ) -> tuple[list[Line], int]:
        """The lines of the quads of ``picture`` (BGR), in their order, and the number of quads not read.

        The largest are read first. Lines that are not `plausible`, below ``min_confidence`` or longer than
        MAX_RATIO are omitted.
        """
        ratios = [max(_sides(quad)) / max(1.0, thickness(quad)) for quad in quads]
        order = sorted(
            (i for i, ratio in enumerate(ratios) if ratio <= MAX_RATIO),
            key=lambda i: (-thickness(quads[i]), i),
        )
        length = 0.0
        selected: list[int] = []
        for i in order:
            length += STRIP_HEIGHT * ratios[i]
            if length > STRIP_BUDGET:
                break
            selected.append(i)
        selected.sort()
        turns = {}
        for i in selected:
            # Tall strips may be turned either way; a strip is upright too unless it is too thin for a letter.
            width, height = _sides(quads[i])
            turns[i] = [0] if height < 1.5 * width else [0, 1, 3] if height < 3 * width else [1, 3]
        best = self._best(picture, quads, turns)
        upside_down = {
            i: [(best[i][0] + 2) % 4]
            for i in selected
            if len(turns[i]) == 1 and best[i][1].confidence < RETRY_TURNED
        }
        for i, (turn, line) in self._best(picture, quads, upside_down).items():
            # Upside down must be clearly better: badly read letters get similar confidences both ways.
            if line.confidence > best[i][1].confidence + 0.05:
                best[i] = (turn, line)
        lines = [best[i][1] for i in selected]
        lines = [line for line in lines if line.confidence >= min_confidence and plausible(line)]
        return self._stable(picture, lines), len(order) - len(selected)

    def _stable(self, picture: np.ndarray, lines: list[Line]) -> list[Line]:
        """Drop short lines that read differently when cropped again, as most false detections in textures do.

        Lines with at least SURE stay, with the mean confidence of the three readings.
        """
        short = [line for line in lines if _letters(line) <= SHORT and line.confidence < CERTAIN]
        cuts = []
        for quad, share in itertools.product([line.quad for line in short], (-NUDGE, NUDGE)):
            width, height = (max(1e-6, side) for side in _sides(quad))
            along, down = (quad[1] - quad[0]) / width, (quad[3] - quad[0]) / height
            signs = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], np.float32)
            cuts.append(
                (quad + share * height * (signs[:, :1] * along + signs[:, 1:] * down)).astype(np.float32)
            )
        retries = iter(self._recognise(picture, cuts))
        unstable = []
        for line in short:
            same = [
                retry.confidence
                for retry in (next(retries), next(retries))
                if retry.text.lower() == line.text.lower()
            ]
            mean = (line.confidence + sum(same)) / 3
            if mean < STABLE and line.confidence < SURE:
                unstable.append(line)
            elif mean < STABLE:
                line.confidence = mean
        return [line for line in lines if not any(line is other for other in unstable)]

    def _best(
        self, picture: np.ndarray, quads: np.ndarray, turns: dict[int, list[int]]
    ) -> dict[int, tuple[int, Line]]:
        """For each quad the turn (quarters, counter-clockwise) with the highest confidence, and its line."""
        attempts = [(i, turn) for i, options in turns.items() for turn in options]
        best: dict[int, tuple[int, Line]] = {}
        rolled = [np.roll(quads[i], -turn, axis=0) for i, turn in attempts]
        for (i, turn), line in zip(attempts, self._recognise(picture, rolled), strict=True):
            if i not in best or line.confidence > best[i][1].confidence:
                best[i] = (turn, line)
        return best

    def _quads(self, probabilities: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """The detections in a map of probabilities, in pixels of a picture of ``size`` (height, width)."""
        quads, _ = self._detector.postprocess_op(probabilities[None, None], size)
        return np.asarray(quads, np.float32).reshape(-1, 4, 2)

    def _searched(self, image: np.ndarray, detail: np.ndarray, coarse: np.ndarray) -> np.ndarray:
        """Probabilities of the tiles with fine ``detail`` (bool [H, W]), up to FINE_BUDGET pixels.

        Tiles where ``coarse``, the map of the scaled-down picture, hints at text come first.
        """
        height, width = image.shape[:2]
        hints = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR)
        tiles = []
        for y0, y1 in _tiles(height):
            for x0, x1 in _tiles(width):
                part = detail[y0:y1, x0:x1]
                x, y, w, h = cv2.boundingRect(part.view(np.uint8))
                if w and h:
                    hint = float(hints[y0:y1, x0:x1][part].max())
                    rows = max(0, y0 + y - OVERLAP), min(height, y0 + y + h + OVERLAP)
                    columns = max(0, x0 + x - OVERLAP), min(width, x0 + x + w + OVERLAP)
                    tiles.append((round(min(hint, HINT), 2), float(part.sum()), rows, columns))
        probabilities, used = np.zeros((height, width), np.float32), 0
        for _, _, (top, bottom), (left, right) in sorted(tiles, reverse=True):
            used += (bottom - top) * (right - left)
            if used > FINE_BUDGET:
                break
            # Only one of two tiles sees the end of a line that barely reaches into the other: take the
            # maximum.
            part = probabilities[top:bottom, left:right]
            np.maximum(part, self._map(image[top:bottom, left:right]), out=part)
        return probabilities

    def _map(self, tile: np.ndarray) -> np.ndarray:
        """The detector's probability of text, float32 [H, W], for uint8 [H, W, 3]."""
        h, w = tile.shape[:2]
        padded = cv2.copyMakeBorder(tile, 0, -h % 32, 0, -w % 32, cv2.BORDER_REPLICATE)
        tensor = (padded.astype(np.float32) * (2 / 255) - 1).transpose(2, 0, 1)[None]
        return self._detector.session(np.ascontiguousarray(tensor))[0, 0, :h, :w]

    def _recognise(self, picture: np.ndarray, quads: list[np.ndarray]) -> list[Line]:
        if not quads:
            return []
        from rapidocr.ch_ppocr_rec import TextRecInput

        self._recogniser.rec_image_shape = [3, STRIP_HEIGHT, 320 if len(quads) <= MANY_LINES else 160]
        output = self._recogniser(
            TextRecInput(img=[strip(picture, quad) for quad in quads], return_word_box=True)
        )
        lines = []
        for quad, text, confidence, info in zip(
            quads, output.txts, output.scores, output.word_results, strict=True
        ):
            columns = [column for word in info.word_cols for column in word]
            confidences = [
                c for c, character in zip(info.confs, text, strict=False) if not character.isspace()
            ]
            positions = [min(1.0, (column + 0.5) / info.line_txt_len) for column in columns]
            lines.append(Line(text, float(confidence), quad, positions, confidences))
        return lines


def plausible(line: Line) -> bool:
    """Whether the confidence suffices: foliage and bricks are often read as one or two letters."""
    letters = _letters(line)
    required = MIN_SHORT if letters <= 2 else MIN_CONFIDENCE
    return bool(line.text.strip()) and line.confidence >= (required if letters else MIN_SYMBOL)


def _letters(line: Line) -> int:
    return sum(character.isalnum() for character in line.text)


def thickness(quad: np.ndarray) -> float:
    """The shorter side of a quad, about 1.5 letter heights."""
    return min(_sides(quad))


def strip(picture: np.ndarray, quad: np.ndarray) -> np.ndarray:
    """The pixels of a quad as a horizontal strip, uint8 [48, w, 3]; large letters are averaged down."""
    width, height = (max(1.0, side) for side in _sides(quad))
    x0, y0 = np.floor(quad.min(0)).astype(int) - 2
    x1, y1 = np.ceil(quad.max(0)).astype(int) + 2
    x0, y0 = max(0, x0), max(0, y0)
    patch, corners = picture[y0:y1, x0:x1], quad - (x0, y0)
    if (scale := STRIP_HEIGHT / height) < 0.75:
        size = max(1, round(patch.shape[1] * scale)), max(1, round(patch.shape[0] * scale))
        corners = corners * (size[0] / patch.shape[1], size[1] / patch.shape[0])
        patch = cv2.resize(patch, size, interpolation=cv2.INTER_AREA)
    length = max(8, round(STRIP_HEIGHT * width / height))
    flat = np.array([[0, 0], [length, 0], [length, STRIP_HEIGHT], [0, STRIP_HEIGHT]], np.float32)
    matrix = cv2.getPerspectiveTransform(corners.astype(np.float32), flat)
    return cv2.warpPerspective(
        patch, matrix, (length, STRIP_HEIGHT), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
    )


def _sides(quad: np.ndarray) -> tuple[float, float]:
    return float(np.linalg.norm(quad[1] - quad[0])), float(np.linalg.norm(quad[3] - quad[0]))


def _resized(picture: np.ndarray, scale: float) -> np.ndarray:
    height, width = picture.shape[:2]
    size = max(1, round(width * scale)), max(1, round(height * scale))
    kind = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
    return picture if size == (width, height) else cv2.resize(picture, size, interpolation=kind)


def _tiles(length: int) -> list[tuple[int, int]]:
    count = 1 if length <= TILE + 2 * OVERLAP else math.ceil(length / TILE)
    return list(itertools.pairwise(round(i * length / count) for i in range(count + 1)))


def _covered(quad: np.ndarray, others: list[np.ndarray]) -> float:
    """Upper bound of the share of a quad's box that the boxes of others cover."""
    if not len(others):
        return 0.0
    low, high = quad.min(0), quad.max(0)
    lows, highs = np.array([o.min(0) for o in others]), np.array([o.max(0) for o in others])
    sides = np.clip(np.minimum(high, highs) - np.maximum(low, lows), 0, None)
    return float(min(1.0, sides.prod(1).sum() / max(1.0, (high - low).prod())))
