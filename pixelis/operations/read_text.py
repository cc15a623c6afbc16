"""READ_TEXT: the text of a region as lines in reading order, with boxes and confidences."""

from __future__ import annotations

import itertools
from typing import Any

import cv2
import numpy as np
from pydantic import Field

from pixelis.config import ToolboxConfig
from pixelis.operations import geometry, ocr
from pixelis.operations.operation import BoxArgument, Operation, OperationArguments, Result, Scene, Target
from pixelis.records import Box

MIN_UNDETECTED = 0.9
"""Least confidence of a region without detected text that is read as one line: texture often reads as
letters."""
UNCERTAIN = 0.9
"""Lines below this confidence are marked as uncertain in the text."""
MAX_TEXT = 1900
NARROW, WIDE = frozenset("iljtfrI1.,:;!|'()[]"), frozenset("mwMW@%")


class ReadTextArguments(OperationArguments):
    box: BoxArgument | None = Field(None, description="the region to read, default all of the image")


class ReadText(Operation):
    """Reads full-resolution pixels. Shows no image: the boxes in the text say where to zoom."""

    name = "read_text"
    description = (
        "Read the text in a region of an image, or in all of it. Returns the lines in reading order, each "
        "with its box; (?) "
        "marks an uncertain line. Reads in full resolution, also tight crops of one word; small text in a "
        "large picture is read "
        "best from a smaller region."
    )
    Arguments = ReadTextArguments

    @classmethod
    def ready(cls, settings: ToolboxConfig) -> None:
        """Raise MissingDependency unless the models are installed."""
        ocr.model_files()

    @classmethod
    def run(cls, arguments: ReadTextArguments, target: Target, scene: Scene) -> Result:
        """Return lines of text, maybe none. Raises ``out_of_range``, ``too_small``, ``not_a_picture``.

        data: ``lines`` (text, confidence, upright box, words), ``num_lines``, ``num_words``, ``confidence``
        (mean over characters), ``unread`` (lines beyond the budget of a call), ``engine``, ``pixels`` (the
        region). A word's box is exact to about a third of a letter.
        """
        picture = target.picture
        edges = target.pixels(arguments.box or geometry.WHOLE)
        text_lines, unread = read(picture, edges)
        height, width = picture.shape[:2]
        lines = [_describe(line, width, height) for line in text_lines]
        confidences = [c for line in text_lines for c in line.confidences]
        data = {
            "lines": lines,
            "num_lines": len(lines),
            "num_words": sum(len(line["words"]) for line in lines),
            "confidence": round(float(np.mean(confidences)), 4) if confidences else 0.0,
            "unread": unread,
            "engine": ocr.NAME,
            "pixels": list(edges),
        }
        return Result(text=format_lines(lines, unread, target, scene), data=data)


def read(picture: np.ndarray, edges: tuple[int, int, int, int]) -> tuple[list[ocr.Line], int]:
    """Read the text whose centers lie inside left, top, right, bottom of ``picture`` (uint8 [H, W, 3], RGB).

    Returns the lines in reading order, quads in pixels of the picture, and the number of lines not read.
    """
    engine = ocr.engine()
    region, origin = _with_margin(picture, edges)
    quads = engine.find(region)
    inner = np.array(edges, np.float32) - np.tile(origin, 2)
    quads = quads[((quads.max(1) > inner[:2]) & (quads.min(1) < inner[2:])).all(1)]
    lines, unread = engine.read(region, quads)
    lines = [part for line in lines if (part := _inside(line, inner)) is not None]
    if not lines:
        left, top, right, bottom = inner
        region_quad = np.array([[[left, top], [right, top], [right, bottom], [left, bottom]]], np.float32)
        lines, _ = engine.read(region, region_quad, MIN_UNDETECTED)
    for line in lines:
        line.quad = line.quad + origin
    return reading_order(lines), unread


def _with_margin(picture: np.ndarray, edges: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """A region with a margin, BGR, and its corner: the detector misses text that fills its picture.

    The margin is half the shorter side; beyond the picture it has the median colour of the region's edge.
    """
    left, top, right, bottom = edges
    height, width = picture.shape[:2]
    pad = int(min(max(min(right - left, bottom - top) / 2, 8), 64))
    x0, y0, x1, y1 = max(0, left - pad), max(0, top - pad), min(width, right + pad), min(height, bottom + pad)
    region = cv2.cvtColor(np.ascontiguousarray(picture[y0:y1, x0:x1]), cv2.COLOR_RGB2BGR)
    missing = (y0 - top + pad, bottom + pad - y1, x0 - left + pad, right + pad - x1)
    if any(missing):
        border = np.concatenate([region[0], region[-1], region[:, 0], region[:, -1]])
        colour = [float(c) for c in np.median(border, axis=0)]
        region = cv2.copyMakeBorder(region, *missing, cv2.BORDER_CONSTANT, value=colour)
    return region, np.array([left - pad, top - pad], np.float32)


def _inside(line: ocr.Line, inner: np.ndarray) -> ocr.Line | None:
    """The characters of a line whose centers are in the region; None when there are none."""
    centers = [_cross_section(line.quad, position).mean(0) for position in line.positions]
    keep = [bool((inner[:2] <= center).all() and (center <= inner[2:]).all()) for center in centers]
    if all(keep):
        return line if keep else None
    if not any(keep):
        return None
    text, flags = "", iter(keep)
    for character in line.text:
        text += character if character.isspace() or next(flags) else " "
    indices = np.flatnonzero(keep).tolist()
    spans = _spans(line)
    start, end = spans[indices[0]][0], spans[indices[-1]][1]
    confidences = [line.confidences[i] for i in indices]
    positions = [(line.positions[i] - start) / (end - start) for i in indices]
    quad = _section(line.quad, start, end)
    return ocr.Line(" ".join(text.split()), float(np.mean(confidences)), quad, positions, confidences)


def _cross_section(quad: np.ndarray, position: float) -> np.ndarray:
    """The upper and lower point of a line at ``position``, 0..1 along it: float [2, 2]."""
    return np.stack([quad[0] + position * (quad[1] - quad[0]), quad[3] + position * (quad[2] - quad[3])])


def _section(quad: np.ndarray, start: float, end: float) -> np.ndarray:
    (a, d), (b, c) = _cross_section(quad, start), _cross_section(quad, end)
    return np.stack([a, b, c, d])


def _spans(line: ocr.Line) -> list[tuple[float, float]]:
    """Start and end of each character, 0..1 along the line, from the centers that the recogniser gives.

    Distances are divided by typical widths of letters, with half a letter for a space.
    """
    letters = [character for character in line.text if not character.isspace()][: len(line.positions)]
    sizes = [0.5 if letter in NARROW else 1.5 if letter in WIDE else 1.0 for letter in letters]
    spaced: list[bool] = []
    for previous, character in itertools.pairwise(line.text.strip()):
        if not character.isspace():
            spaced.append(previous.isspace())
    steps, units = [], []
    for i, (a, b) in enumerate(itertools.pairwise(line.positions[: len(letters)])):
        units.append((sizes[i] + sizes[i + 1]) / 2 + 0.5 * spaced[i])
        steps.append(b - a)
    unit = sum(steps) / max(sum(units), 1e-9) if steps else 1.0
    spans = [
        [p - unit * size / 2, p + unit * size / 2] for p, size in zip(line.positions, sizes, strict=False)
    ]
    for i, step in enumerate(steps):
        share = step / units[i]
        spans[i][1] = line.positions[i] + share * (sizes[i] / 2 + 0.25 * spaced[i])
        spans[i + 1][0] = spans[i][1]
    spans[0][0], spans[-1][1] = 0.0, 1.0
    return [(a, b) for a, b in spans]


def _describe(line: ocr.Line, width: int, height: int) -> dict[str, Any]:
    words, first, spans = [], 0, _spans(line)
    for word in line.text.split():
        last = first + len(word) - 1
        if last < len(spans):
            quad = _section(line.quad, spans[first][0], spans[last][1])
            confidence = float(np.mean(line.confidences[first : last + 1]))
            words.append(
                {
                    "text": word,
                    "confidence": round(confidence, 4),
                    "box": list(_bounding_box(quad, width, height)),
                }
            )
        first = last + 1
    box = list(_bounding_box(line.quad, width, height))
    return {"text": line.text.strip(), "confidence": round(line.confidence, 4), "box": box, "words": words}


def _bounding_box(quad: np.ndarray, width: int, height: int) -> Box:
    size = np.array([width, height])
    low, high = np.clip(quad.min(0), 0, size - 1), np.clip(quad.max(0), 1, size)
    x0, y0, x1, y1 = np.concatenate([np.minimum(low, high - 1) / size, high / size]).round(6).tolist()
    return x0, y0, x1, y1


def reading_order(lines: list[ocr.Line]) -> list[ocr.Line]:
    """Sort lines as they are read, on the upright page: prose column by column, else row by row."""
    if len(lines) < 2:
        return lines
    along = sum((line.quad[1] - line.quad[0] + line.quad[2] - line.quad[3] for line in lines), np.zeros(2))
    x, y = along / max(float(np.linalg.norm(along)), 1e-9)
    rotated = [line.quad @ np.array([[x, -y], [y, x]]) for line in lines]
    boxes = np.array([[*quad.min(0), *quad.max(0)] for quad in rotated])
    return [lines[i] for i in _ordered(boxes, list(range(len(lines))))]


def _ordered(boxes: np.ndarray, chosen: list[int]) -> list[int]:
    """Boxes [n, 4] in reading order; lines that span the columns separate what is above and below."""
    gutter = _gutter(boxes[chosen])
    if gutter is None:
        return _rows(boxes, chosen)
    across = sorted((i for i in chosen if boxes[i][0] < gutter < boxes[i][2]), key=lambda i: boxes[i][1])
    remaining = [i for i in chosen if i not in set(across)]
    out: list[int] = []
    for i in [*across, None]:
        above = [j for j in remaining if i is None or boxes[j][1] + boxes[j][3] < boxes[i][1] + boxes[i][3]]
        remaining = [j for j in remaining if j not in set(above)]
        for side in (
            [j for j in above if boxes[j][2] <= gutter],
            [j for j in above if boxes[j][0] >= gutter],
        ):
            out += _ordered(boxes, side) if len(side) < len(chosen) else _rows(boxes, side)
        out += [] if i is None else [i]
    return out


def _gutter(boxes: np.ndarray) -> float | None:
    """x of the gap between columns of prose, or prose and a grid; None for one column and for tables."""
    if len(boxes) < 6:
        return None
    heights = boxes[:, 3] - boxes[:, 1]
    best: tuple[int, float] | None = None
    for edge in np.unique(boxes[:, 2]):
        x = float(edge) + 0.25 * float(np.median(heights))
        left, right = boxes[boxes[:, 2] <= x], boxes[boxes[:, 0] >= x]
        across = len(boxes) - len(left) - len(right)
        few = min(len(left), len(right))
        if few < 3 or across > few / 2:
            continue
        prose = [
            np.median((side[:, 2] - side[:, 0]) / (side[:, 3] - side[:, 1])) > 6 for side in (left, right)
        ]
        shared = min(left[:, 3].max(), right[:, 3].max()) - max(left[:, 1].min(), right[:, 1].min())
        apart = all(prose) or (any(prose) and not _aligned(*((left, right) if prose[0] else (right, left))))
        if apart and shared > 2 * np.median(heights) and (best is None or across < best[0]):
            best = (across, x)
    return None if best is None else best[1]


def _aligned(prose: np.ndarray, cells: np.ndarray) -> bool:
    """Whether most cells are level with lines of the other side, as the prices of a list are."""
    centres = (prose[:, 1] + prose[:, 3]) / 2
    offsets = np.abs((cells[:, 1] + cells[:, 3])[:, None] / 2 - centres[None]).min(1)
    return bool(np.mean(offsets < 0.2 * np.median(prose[:, 3] - prose[:, 1])) > 0.7)


def _rows(boxes: np.ndarray, chosen: list[int]) -> list[int]:
    """Row by row: a line joins a row if it is beside its nearest line and shares half its height."""
    rows: list[list[int]] = []
    for i in sorted(chosen, key=lambda i: boxes[i][1] + boxes[i][3]):
        for row in reversed(rows[-3:]):
            nearest = min(row, key=lambda j: abs(boxes[j][0] + boxes[j][2] - boxes[i][0] - boxes[i][2]))
            x0, y0 = np.maximum(boxes[i][:2], boxes[nearest][:2])
            x1, y1 = np.minimum(boxes[i][2:], boxes[nearest][2:])
            width, height = np.minimum(boxes[i][2:] - boxes[i][:2], boxes[nearest][2:] - boxes[nearest][:2])
            if x1 - x0 < 0.3 * width and y1 - y0 > 0.5 * height:
                row.append(i)
                break
        else:
            rows.append([i])
    return [i for row in rows for i in sorted(row, key=lambda i: boxes[i][0])]


def format_lines(lines: list[dict[str, Any]], unread: int, target: Target, scene: Scene) -> str:
    """The policy's text: each line with its box in the policy's scale, truncated at MAX_TEXT characters."""
    if not lines and not unread:
        return "no text found"
    entries: list[str] = []
    size = 0
    for line in lines:
        box = scene.place(line["box"], target)
        entry = f"{','.join(map(str, box))} {line['text']}" + (
            " (?)" if line["confidence"] < UNCERTAIN else ""
        )
        if size + len(entry) > MAX_TEXT:
            if not entries:
                entries.append(entry[:MAX_TEXT] + "...")
            break
        entries.append(entry)
        size += len(entry) + 1
    omitted = len(lines) - len(entries) + unread
    if omitted:
        entries.append(f"... and {omitted} more lines; zoom in to read them")
    return "\n".join(entries)
