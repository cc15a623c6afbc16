"""Finds and reads text in an array with rapidocr, working around its known pitfalls.

Detection looks at a probability map that is stitched from tiles, so its memory is bounded and a line that crosses a tile's edge
stays one line. Large pictures are looked at twice: small as a whole for large letters, then at (nearly) full size where there
is fine detail. Every line is cut from the full-size pixels for recognition, and turned when it reads better that way.
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
"""What the look at a whole picture may cost, about 0.8 s on one core."""
FINE_PIXELS = 10_000_000
"""What the look at the fine detail of a large picture may cost at most, about 4 s."""
SMALL_PIXELS = 400_000
MAX_UPSCALE = 3.0
TILE, OVERLAP = 1024, 64
STRIP_HEIGHT = 48
MANY = 40
"""So many lines are read without padding the short ones to the recogniser's full width: half the time, a little less sure."""
STRIP_BUDGET = 120_000
"""Total length of the lines that are read, in pixels at STRIP_HEIGHT: about 9 s."""
TRUSTED_HEIGHT = 20
"""Text this high in the small look is read from there; smaller text is looked for again in the detail."""
LEAST, LEAST_SHORT, LEAST_SYMBOL = 0.55, 0.8, 0.95
"""Confidence of a line of three and more letters, of one or two, and of none, for `plausible`."""
DOUBT = 0.85
"""A line read with less confidence is tried upside down as well."""
SHORT, CERTAIN, STEADY = 4, 0.98, 0.8
"""A line of up to so many letters that is less than certain must read alike when cut tighter and wider, with this confidence."""
NUDGE = 0.06
"""How much tighter and wider, in heights of the line."""


@dataclass(slots=True)
class Line:
    """A line of text. ``quad``: float [4, 2], x and y of its corners from where reading starts, clockwise as read.

    ``places``: for each character of ``text`` without spaces its middle, 0..1 along the line; ``sure`` their confidences.
    """

    text: str
    confidence: float
    quad: np.ndarray
    places: list[float]
    sure: list[float]


@cache
def engine() -> Engine:
    """The engine of this process, loaded when first asked for (about a second); raises MissingDependency."""
    return Engine()


def model_files() -> dict[str, Path]:
    """The models inside the installed package; raises MissingDependency.

    rapidocr would fetch a missing model from the network: it is given paths, and only ones that exist.
    """
    spec = find_spec("rapidocr")
    if spec is None or spec.origin is None or find_spec("onnxruntime") is None:
        raise MissingDependency("read_text needs rapidocr and onnxruntime", fix="pip install rapidocr onnxruntime")
    paths = {part: Path(spec.origin).parent / "models" / name for part, name in MODELS.items()}
    for path in paths.values():
        if not path.is_file():
            raise MissingDependency(
                f"the installed rapidocr lacks its model {path.name}", fix="pip install --force-reinstall 'rapidocr>=3.10,<3.11'"
            )
    return paths


class Engine:
    """Detector and recogniser on one CPU thread, from the model files inside the package: nothing is ever downloaded."""

    def __init__(self) -> None:
        paths = model_files()
        import rapidocr

        logging.getLogger("RapidOCR").setLevel(logging.CRITICAL)
        threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
        files = {f"{part}.model_path": str(path) for part, path in paths.items()}
        loaded = rapidocr.RapidOCR(params={"Global.log_level": "critical", **threads, **files})
        self._detector: Any = loaded._load_det_model()
        self._recogniser: Any = loaded._load_rec_model()

    def find(self, picture: np.ndarray) -> np.ndarray:
        """Where text stands: quads float32 [n, 4, 2] in pixels of ``picture`` (uint8 [H, W, 3], BGR)."""
        height, width = picture.shape[:2]
        area = height * width
        scale = min(math.sqrt(COARSE_PIXELS / area), 1.0)
        if area < SMALL_PIXELS:
            scale = min(math.sqrt(SMALL_PIXELS / area), MAX_UPSCALE)
        coarse = self._quads(picture, scale)
        fine_scale = min(1.0, math.sqrt(FINE_PIXELS / area))
        if fine_scale < 1.25 * scale:
            return coarse
        fine = self._quads(picture, fine_scale, detail_below=scale)
        large = [quad for quad in coarse if thickness(quad) * scale >= TRUSTED_HEIGHT]
        small = [quad for quad in coarse if thickness(quad) * scale < TRUSTED_HEIGHT]
        # Seen from close, large letters are cut at the tiles' edges: what lies over a line seen whole is that line again.
        found = [quad for quad in fine if _covered(quad, large) < 0.5 and all(_covered(one, [quad]) < 0.5 for one in large)]
        found += [quad for quad in small if _covered(quad, found) < 0.5]
        return np.array([*large, *found], np.float32).reshape(-1, 4, 2)

    def read(self, picture: np.ndarray, quads: np.ndarray, least: float = 0.0) -> tuple[list[Line], int]:
        """What the quads of ``picture`` (BGR) say, in their order, and how many were left unread for their number.

        Lines that are more likely texture than text (`plausible`) or less sure than ``least`` are left out. The largest lines are
        read first when not all can be.
        """
        order = sorted(range(len(quads)), key=lambda i: (-thickness(quads[i]), i))
        length = 0.0
        kept: list[int] = []
        for i in order:
            length += STRIP_HEIGHT * _aspect(quads[i])
            if length > STRIP_BUDGET and kept:
                break
            kept.append(i)
        kept.sort()
        turns = {i: _turns(quads[i]) for i in kept}
        best = self._best(picture, quads, turns)
        again = {i: [(best[i][0] + 2) % 4] for i in kept if len(turns[i]) == 1 and best[i][1].confidence < DOUBT}
        for i, (turn, line) in self._best(picture, quads, again).items():
            # Upside down must be clearly better: half-read letters look alike both ways.
            if line.confidence > best[i][1].confidence + 0.05:
                best[i] = (turn, line)
        lines = [best[i][1] for i in kept]
        lines = [line for line in lines if line.confidence >= least and plausible(line)]
        return self._steady(picture, lines), len(quads) - len(kept)

    def _steady(self, picture: np.ndarray, lines: list[Line]) -> list[Line]:
        """Without short lines that read otherwise, or barely, when cut anew: most seen in textures do, hardly any text."""
        short = [line for line in lines if _letters(line) <= SHORT and line.confidence < CERTAIN]
        cuts = [_grown(line.quad, share) for line in short for share in (-NUDGE, NUDGE)]
        again = iter(self._recognise(picture, cuts))
        shaky = []
        for line in short:
            alike = [other.confidence for other in (next(again), next(again)) if other.text.lower() == line.text.lower()]
            if (line.confidence + sum(alike)) / 3 < STEADY:
                shaky.append(line)
        return [line for line in lines if not any(line is other for other in shaky)]

    def _best(self, picture: np.ndarray, quads: np.ndarray, turns: dict[int, list[int]]) -> dict[int, tuple[int, Line]]:
        """For each quad the turn (quarters, counter-clockwise) that reads with most confidence."""
        tries = [(i, turn) for i, chosen in turns.items() for turn in chosen]
        best: dict[int, tuple[int, Line]] = {}
        turned = [np.roll(quads[i], -turn, axis=0) for i, turn in tries]
        for (i, turn), line in zip(tries, self._recognise(picture, turned), strict=True):
            if i not in best or line.confidence > best[i][1].confidence:
                best[i] = (turn, line)
        return best

    def _quads(self, picture: np.ndarray, scale: float, detail_below: float | None = None) -> np.ndarray:
        height, width = picture.shape[:2]
        h, w = max(1, round(height * scale)), max(1, round(width * scale))
        kind = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
        image = picture if (h, w) == (height, width) else cv2.resize(picture, (w, h), interpolation=kind)
        wanted = None if detail_below is None else _detail(image, detail_below / scale)
        map_ = np.zeros((h, w), np.float32)
        # Letters larger than a tile's overlap break at its edge: a whole look is never cut.
        tile = max(h, w) if wanted is None else TILE
        for top, bottom, y0, y1 in _tiles(h, tile):
            for left, right, x0, x1 in _tiles(w, tile):
                if wanted is None or wanted[y0:y1, x0:x1].any():
                    # The end of a line that just reaches into a tile is seen by its neighbour alone: the surer one counts.
                    part = map_[top:bottom, left:right]
                    np.maximum(part, self._probabilities(image[top:bottom, left:right]), out=part)
        quads, _ = self._detector.postprocess_op(map_[None, None], (height, width))
        return np.asarray(quads, np.float32).reshape(-1, 4, 2)

    def _probabilities(self, tile: np.ndarray) -> np.ndarray:
        h, w = tile.shape[:2]
        padded = cv2.copyMakeBorder(tile, 0, -h % 32, 0, -w % 32, cv2.BORDER_REPLICATE)
        tensor = (padded.astype(np.float32) * (2 / 255) - 1).transpose(2, 0, 1)[None]
        return self._detector.session(np.ascontiguousarray(tensor))[0, 0, :h, :w]

    def _recognise(self, picture: np.ndarray, quads: list[np.ndarray]) -> list[Line]:
        if not quads:
            return []
        from rapidocr.ch_ppocr_rec import TextRecInput

        self._recogniser.rec_image_shape = [3, STRIP_HEIGHT, 320 if len(quads) <= MANY else 160]
        found = self._recogniser(TextRecInput(img=[strip(picture, quad) for quad in quads], return_word_box=True))
        lines = []
        for quad, text, confidence, info in zip(quads, found.txts, found.scores, found.word_results, strict=True):
            columns = [column for word in info.word_cols for column in word]
            sure = [s for s, character in zip(info.confs, text, strict=False) if not character.isspace()]
            places = [min(1.0, (column + 0.5) / info.line_txt_len) for column in columns]
            lines.append(Line(text, float(confidence), quad, places, sure))
        return lines


def plausible(line: Line) -> bool:
    """True when a line is sure enough to be text: foliage, bricks and the like read as a letter or two, or as a bullet."""
    letters = _letters(line)
    least = LEAST_SHORT if letters <= 2 else LEAST
    return bool(line.text.strip()) and line.confidence >= (least if letters else LEAST_SYMBOL)


def _letters(line: Line) -> int:
    return sum(character.isalnum() for character in line.text)


def thickness(quad: np.ndarray) -> float:
    """The shorter side of a quad: about the height of its letters and a half."""
    return min(_sides(quad))


def strip(picture: np.ndarray, quad: np.ndarray) -> np.ndarray:
    """The pixels of a quad laid flat, uint8 [48, w, 3]; large letters are averaged down, never skipped over."""
    width, height = (max(1.0, side) for side in _sides(quad))
    x0, y0 = np.floor(quad.min(0)).astype(int) - 2
    x1, y1 = np.ceil(quad.max(0)).astype(int) + 2
    x0, y0 = max(0, x0), max(0, y0)
    patch, corners = picture[y0:y1, x0:x1], quad - (x0, y0)
    if (shrink := STRIP_HEIGHT / height) < 0.75:
        size = max(1, round(patch.shape[1] * shrink)), max(1, round(patch.shape[0] * shrink))
        corners = corners * (size[0] / patch.shape[1], size[1] / patch.shape[0])
        patch = cv2.resize(patch, size, interpolation=cv2.INTER_AREA)
    length = max(8, round(STRIP_HEIGHT * width / height))
    flat = np.array([[0, 0], [length, 0], [length, STRIP_HEIGHT], [0, STRIP_HEIGHT]], np.float32)
    matrix = cv2.getPerspectiveTransform(corners.astype(np.float32), flat)
    return cv2.warpPerspective(patch, matrix, (length, STRIP_HEIGHT), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)


def _grown(quad: np.ndarray, share: float) -> np.ndarray:
    """A quad with ``share`` of its height more on every side."""
    width, height = (max(1e-6, side) for side in _sides(quad))
    along, down = (quad[1] - quad[0]) / width, (quad[3] - quad[0]) / height
    signs = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], np.float32)
    return (quad + share * height * (signs[:, :1] * along + signs[:, 1:] * down)).astype(np.float32)


def _sides(quad: np.ndarray) -> tuple[float, float]:
    return float(np.linalg.norm(quad[1] - quad[0])), float(np.linalg.norm(quad[3] - quad[0]))


def _aspect(quad: np.ndarray) -> float:
    return max(_sides(quad)) / max(1.0, min(_sides(quad)))


def _turns(quad: np.ndarray) -> list[int]:
    """Quarter turns under which a quad may be text: standing strips both ways, and upright while a letter could be so thin."""
    width, height = _sides(quad)
    if height < 1.5 * width:
        return [0]
    return [0, 1, 3] if height < 3 * width else [1, 3]


def _tiles(length: int, tile: int) -> list[tuple[int, int, int, int]]:
    """Overlapping stretches of a side: from, to, and the part in the middle that each is asked for."""
    if length <= tile + 2 * OVERLAP:
        return [(0, length, 0, length)]
    count = math.ceil(length / tile)
    edges = [round(i * length / count) for i in range(count + 1)]
    return [(max(0, a - OVERLAP), min(length, b + OVERLAP), a, b) for a, b in itertools.pairwise(edges)]


def _detail(image: np.ndarray, scale: float) -> np.ndarray:
    """Bool [H, W]: where shrinking by ``scale`` loses enough contrast for small letters to be there."""
    h, w = image.shape[:2]
    grey = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
    small = cv2.resize(grey, (max(1, round(w * scale)), max(1, round(h * scale))), interpolation=cv2.INTER_AREA)
    lost = cv2.absdiff(grey, cv2.resize(small, (w, h), interpolation=cv2.INTER_LINEAR))
    share = cv2.boxFilter((lost > 12).astype(np.float32), -1, (24, 24))
    return share > 0.06


def _covered(quad: np.ndarray, others: list[np.ndarray]) -> float:
    """The share of a quad's hull that the hulls of others cover, at most; 0 when there are none."""
    if not len(others):
        return 0.0
    low, high = quad.min(0), quad.max(0)
    lows, highs = np.array([o.min(0) for o in others]), np.array([o.max(0) for o in others])
    sides = np.clip(np.minimum(high, highs) - np.maximum(low, lows), 0, None)
    return float(min(1.0, sides.prod(1).sum() / max(1.0, (high - low).prod())))
