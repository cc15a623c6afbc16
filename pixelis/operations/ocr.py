"""Detects and recognises text in an array with rapidocr's models.

Large pictures are searched at two sizes, for large and small letters; lines are read from full-size pixels.
"""

from __future__ import annotations

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

COARSE_PIXELS, FINE_PIXELS = 2_000_000, 5_000_000
"""Most pixels of the copies in which text is detected; about 0.8 and 2 s on one core."""
TRUSTED_HEIGHT = 14
"""Lines of this height in the first copy are taken from it."""
SMALL_PIXELS = 400_000
MAX_UPSCALE = 3.0
STRIP_HEIGHT = 48
MANY_LINES = 40
"""With more lines the recogniser pads to half its width: half the time, slightly lower confidence."""
STRIP_BUDGET = 120_000
"""Most columns of text that are recognised, at STRIP_HEIGHT; about 9 s."""
MAX_RATIO = 150
"""Longest line that is recognised, in line heights; longer ones are rules."""
MIN_CONFIDENCE, MIN_SHORT, MIN_SYMBOL = 0.55, 0.8, 0.95
"""Least confidence of lines with three or more letters, with one or two, and with none."""
RETRY_TURNED = 0.85


@dataclass(slots=True)
class Line:
    """A line of text; ``quad``: float [4, 2], corners in pixels, clockwise from the start of the text.

    ``positions`` (0..1 along the line) and ``confidences`` are of the characters without spaces.
    """

    text: str
    confidence: float
    quad: np.ndarray
    positions: list[float]
    confidences: list[float]


@cache
def engine() -> Engine:
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
    """Detector and recogniser on one CPU thread; never downloads."""

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
        area = picture.shape[0] * picture.shape[1]
        scale = min(
            math.sqrt(COARSE_PIXELS / area), max(1.0, min(math.sqrt(SMALL_PIXELS / area), MAX_UPSCALE))
        )
        coarse = self._detect(picture, scale)
        fine_scale = min(1.0, math.sqrt(FINE_PIXELS / area))
        if fine_scale < 1.25 * scale:
            return coarse
        large = [quad for quad in coarse if thickness(quad) * scale >= TRUSTED_HEIGHT]
        small = [quad for quad in coarse if thickness(quad) * scale < TRUSTED_HEIGHT]
        # The second look sees small letters, and large ones in pieces.
        extra = [
            quad
            for quad in self._detect(picture, fine_scale)
            if _covered(quad, large) < 0.5 and all(_covered(line, [quad]) < 0.5 for line in large)
        ]
        extra += [quad for quad in small if _covered(quad, extra) < 0.5]
        return np.array([*large, *extra], np.float32).reshape(-1, 4, 2)

    def _detect(self, picture: np.ndarray, scale: float) -> np.ndarray:
        size = max(1, round(picture.shape[1] * scale)), max(1, round(picture.shape[0] * scale))
        image = cv2.resize(picture, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
        image = cv2.copyMakeBorder(image, 0, -size[1] % 32, 0, -size[0] % 32, cv2.BORDER_REPLICATE)
        tensor = (image.astype(np.float32) * (2 / 255) - 1).transpose(2, 0, 1)[None]
        probabilities = self._detector.session(np.ascontiguousarray(tensor))[..., : size[1], : size[0]]
        quads, _ = self._detector.postprocess_op(probabilities, picture.shape[:2])
        return np.asarray(quads, np.float32).reshape(-1, 4, 2)

    def read(
        self, picture: np.ndarray, quads: np.ndarray, min_confidence: float = 0.0
    ) -> tuple[list[Line], int]:
        """Recognise quads of ``picture`` (BGR), the largest first within STRIP_BUDGET.

        Returns the plausible lines in the order of the quads, and the number of quads left out.
        """
        ratios = np.array([max(_sides(quad)) / max(1.0, thickness(quad)) for quad in quads])
        order = [
            i
            for i in np.argsort([-thickness(quad) for quad in quads], kind="stable")
            if ratios[i] <= MAX_RATIO
        ]
        count = int(np.searchsorted(np.cumsum(STRIP_HEIGHT * ratios[order]), STRIP_BUDGET, side="right"))
        selected = sorted(order[:count])
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
        lines = [
            line for i in selected if plausible(line := best[i][1]) and line.confidence >= min_confidence
        ]
        return lines, len(order) - len(selected)

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
    """Whether the confidence suffices: foliage and bricks often read as one or two letters."""
    letters = _letters(line)
    required = MIN_SHORT if letters <= 2 else MIN_CONFIDENCE
    return bool(line.text.strip()) and line.confidence >= (required if letters else MIN_SYMBOL)


def _letters(line: Line) -> int:
    return sum(character.isalnum() for character in line.text)


def thickness(quad: np.ndarray) -> float:
    return min(_sides(quad))


def strip(picture: np.ndarray, quad: np.ndarray) -> np.ndarray:
    """The pixels of a quad as a horizontal strip, uint8 [48, w, 3]."""
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


def _covered(quad: np.ndarray, others: list[np.ndarray]) -> float:
    """Upper bound of the share of a quad's bounding box that the boxes of others cover."""
    low, high = quad.min(0), quad.max(0)
    shared = [np.clip(np.minimum(high, o.max(0)) - np.maximum(low, o.min(0)), 0, None).prod() for o in others]
    return float(min(1.0, sum(shared) / max(1.0, (high - low).prod())))
