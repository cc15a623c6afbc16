"""READ_TEXT: the text of a region, line by line in reading order, with where it stands and how sure the reading is."""

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

LEAST_ALONE = 0.9
"""A region in which no text was detected is read as one line; that must be surer, as texture reads as letters too."""
UNSURE = 0.9
"""Lines below this are marked as uncertain for the policy."""
MAX_TEXT = 1900
NARROW, WIDE = frozenset("iljtfrI1.,:;!|'()[]"), frozenset("mwMW@%")


class ReadTextArguments(OperationArguments):
    """``box``: the region, 0..1 of the target; None for all of it."""

    box: BoxArgument | None = Field(None, description="the region to read, default all of the image")


class ReadText(Operation):
    """Reads from full-resolution pixels. Shows no image: the places in the text say where to zoom."""

    name = "read_text"
    description = (
        "Read the text in a region of an image, or in all of it. Returns the lines in reading order, each with its box; (?) "
        "marks an uncertain line. Reads in full resolution, also tight crops of one word; small text in a large picture is read "
        "best from a smaller region."
    )
    Arguments = ReadTextArguments

    @classmethod
    def ready(cls, settings: ToolboxConfig) -> None:
        """The models are installed."""
        ocr.model_files()

    @classmethod
    def run(cls, arguments: ReadTextArguments, target: Target, scene: Scene) -> Result:
        """Lines of text; none found is a success. Errors ``out_of_range``, ``too_small``, ``not_a_picture``.

        data: ``lines`` (text, confidence, box, words), ``num_lines``, ``num_words``, ``confidence`` (mean over characters),
        ``unread`` (lines found beyond what one call may read), ``engine``, ``pixels`` (region read). Boxes are the hulls of
        what may be turned text. A word's box is placed by the recogniser's columns, about a third of a letter exact.
        """
        picture = target.picture
        edges = target.pixels(arguments.box or geometry.WHOLE)
        found, unread = read(picture, edges)
        height, width = picture.shape[:2]
        lines = [_described(line, width, height) for line in found]
        sure = [s for line in found for s in line.sure]
        data = {
            "lines": lines,
            "num_lines": len(lines),
            "num_words": sum(len(line["words"]) for line in lines),
            "confidence": round(float(np.mean(sure)), 4) if sure else 0.0,
            "unread": unread,
            "engine": ocr.NAME,
            "pixels": list(edges),
        }
        return Result(text=told(lines, unread, target, scene), data=data)


def read(picture: np.ndarray, edges: tuple[int, int, int, int]) -> tuple[list[ocr.Line], int]:
    """Lines of text whose middle lies inside left, top, right, bottom of ``picture`` (uint8 [H, W, 3], RGB).

    Returns them in reading order, quads in pixels of the picture, and the number of lines that were not read.
    """
    engine = ocr.engine()
    region, origin = _surrounded(picture, edges)
    quads = engine.find(region)
    inner = np.array(edges, np.float32) - np.tile(origin, 2)
    quads = quads[[_touches(quad, inner) for quad in quads]] if len(quads) else quads
    lines, unread = engine.read(region, quads)
    kept = [part for line in lines if (part := _inside(line, inner)) is not None]
    if not kept:
        left, top, right, bottom = inner
        whole = np.array([[[left, top], [right, top], [right, bottom], [left, bottom]]], np.float32)
        kept, _ = engine.read(region, whole, LEAST_ALONE)
    for line in kept:
        line.quad = line.quad + origin
    return reading_order(kept), unread


def _surrounded(picture: np.ndarray, edges: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """A region with its surroundings as BGR, and where its corner lies in the picture.

    The detector is blind to text that fills its picture: half the region's shorter side is added all round, from the picture
    where it has it, else in the median colour of the region's edge.
    """
    left, top, right, bottom = edges
    height, width = picture.shape[:2]
    pad = int(min(max(min(right - left, bottom - top) / 2, 8), 64))
    x0, y0, x1, y1 = max(0, left - pad), max(0, top - pad), min(width, right + pad), min(height, bottom + pad)
    region = cv2.cvtColor(np.ascontiguousarray(picture[y0:y1, x0:x1]), cv2.COLOR_RGB2BGR)
    missing = (y0 - top + pad, bottom + pad - y1, x0 - left + pad, right + pad - x1)
    if any(missing):
        rim = np.concatenate([region[0], region[-1], region[:, 0], region[:, -1]])
        colour = [float(c) for c in np.median(rim, axis=0)]
        region = cv2.copyMakeBorder(region, *missing, cv2.BORDER_CONSTANT, value=colour)
    return region, np.array([left - pad, top - pad], np.float32)


def _touches(quad: np.ndarray, inner: np.ndarray) -> bool:
    low, high = quad.min(0), quad.max(0)
    return bool((high > inner[:2]).all() and (low < inner[2:]).all())


def _inside(line: ocr.Line, inner: np.ndarray) -> ocr.Line | None:
    """The part of a line whose characters have their middle in the region; None when there is none."""
    middles = [_at(line.quad, place).mean(0) for place in line.places]
    keep = [bool((inner[:2] <= m).all() and (m <= inner[2:]).all()) for m in middles]
    if all(keep):
        return line if keep else None
    if not any(keep):
        return None
    text, flags = "", iter(keep)
    for character in line.text:
        text += character if character.isspace() or next(flags) else " "
    kept = [i for i, yes in enumerate(keep) if yes]
    spans = _spans(line)
    bounds = spans[kept[0]][0], spans[kept[-1]][1]
    sure = [line.sure[i] for i in kept]
    places = [(line.places[i] - bounds[0]) / (bounds[1] - bounds[0]) for i in kept]
    quad = _stretch(line.quad, *bounds)
    return ocr.Line(" ".join(text.split()), float(np.mean(sure)), quad, places, sure)


def _at(quad: np.ndarray, place: float) -> np.ndarray:
    """The upper and lower end of the cut through a line at ``place``, 0..1 along it: float [2, 2]."""
    return np.stack([quad[0] + place * (quad[1] - quad[0]), quad[3] + place * (quad[2] - quad[3])])


def _stretch(quad: np.ndarray, start: float, end: float) -> np.ndarray:
    (a, d), (b, c) = _at(quad, start), _at(quad, end)
    return np.stack([a, b, c, d])


def _spans(line: ocr.Line) -> list[tuple[float, float]]:
    """Where each character begins and ends, 0..1 along the line.

    The recogniser tells where a character's middle is. What lies between two middles is shared out by how wide such letters
    usually are, with half a letter for a space.
    """
    letters = [character for character in line.text if not character.isspace()][: len(line.places)]
    sizes = [0.5 if letter in NARROW else 1.5 if letter in WIDE else 1.0 for letter in letters]
    spaced: list[bool] = []
    for before, character in itertools.pairwise(line.text.strip()):
        if not character.isspace():
            spaced.append(before.isspace())
    steps, units = [], []
    for i, (a, b) in enumerate(itertools.pairwise(line.places[: len(letters)])):
        units.append((sizes[i] + sizes[i + 1]) / 2 + 0.5 * spaced[i])
        steps.append(b - a)
    unit = sum(steps) / max(sum(units), 1e-9) if steps else 1.0
    spans = [[place - unit * size / 2, place + unit * size / 2] for place, size in zip(line.places, sizes, strict=False)]
    for i, step in enumerate(steps):
        share = step / units[i]
        spans[i][1] = line.places[i] + share * (sizes[i] / 2 + 0.25 * spaced[i])
        spans[i + 1][0] = spans[i][1]
    spans[0][0], spans[-1][1] = 0.0, 1.0
    return [(a, b) for a, b in spans]


def _described(line: ocr.Line, width: int, height: int) -> dict[str, Any]:
    words, first, spans = [], 0, _spans(line)
    for word in line.text.split():
        last = first + len(word) - 1
        if last < len(spans):
            quad = _stretch(line.quad, spans[first][0], spans[last][1])
            confidence = float(np.mean(line.sure[first : last + 1]))
            words.append({"text": word, "confidence": round(confidence, 4), "box": list(_hull(quad, width, height))})
        first = last + 1
    box = list(_hull(line.quad, width, height))
    return {"text": line.text.strip(), "confidence": round(line.confidence, 4), "box": box, "words": words}


def _hull(quad: np.ndarray, width: int, height: int) -> Box:
    size = np.array([width, height])
    low, high = np.clip(quad.min(0), 0, size - 1), np.clip(quad.max(0), 1, size)
    x0, y0, x1, y1 = np.concatenate([np.minimum(low, high - 1) / size, high / size]).round(6).tolist()
    return x0, y0, x1, y1


def reading_order(lines: list[ocr.Line]) -> list[ocr.Line]:
    """Lines as a person reads them: columns of prose one after the other, else row by row, left to right.

    The page is first turned so that most of its text lies level.
    """
    if len(lines) < 2:
        return lines
    along = sum((line.quad[1] - line.quad[0] + line.quad[2] - line.quad[3] for line in lines), np.zeros(2))
    x, y = along / max(float(np.linalg.norm(along)), 1e-9)
    turned = [line.quad @ np.array([[x, -y], [y, x]]) for line in lines]
    boxes = np.array([[*quad.min(0), *quad.max(0)] for quad in turned])
    return [lines[i] for i in _ordered(boxes, list(range(len(lines))))]


def _ordered(boxes: np.ndarray, chosen: list[int]) -> list[int]:
    """Indices of boxes [n, 4] in reading order; lines that span the columns part what is above from what is below."""
    gutter = _gutter(boxes[chosen])
    if gutter is None:
        return _rows(boxes, chosen)
    across = sorted((i for i in chosen if boxes[i][0] < gutter < boxes[i][2]), key=lambda i: boxes[i][1])
    rest = [i for i in chosen if i not in set(across)]
    out: list[int] = []
    for i in [*across, None]:
        above = [j for j in rest if i is None or boxes[j][1] + boxes[j][3] < boxes[i][1] + boxes[i][3]]
        rest = [j for j in rest if j not in set(above)]
        for side in ([j for j in above if boxes[j][2] <= gutter], [j for j in above if boxes[j][0] >= gutter]):
            out += _ordered(boxes, side) if len(side) < len(chosen) else _rows(boxes, side)
        out += [] if i is None else [i]
    return out


def _gutter(boxes: np.ndarray) -> float | None:
    """x of the white space between two columns of prose; None for one column, and for tables, whose cells are short."""
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
        prose = all(np.median((side[:, 2] - side[:, 0]) / (side[:, 3] - side[:, 1])) > 6 for side in (left, right))
        shared = min(left[:, 3].max(), right[:, 3].max()) - max(left[:, 1].min(), right[:, 1].min())
        if prose and shared > 2 * np.median(heights) and (best is None or across < best[0]):
            best = (across, x)
    return None if best is None else best[1]


def _rows(boxes: np.ndarray, chosen: list[int]) -> list[int]:
    """Row by row from the top: a line joins the row whose nearest line it stands beside, half of its height shared."""
    rows: list[list[int]] = []
    for i in sorted(chosen, key=lambda i: boxes[i][1] + boxes[i][3]):
        for row in reversed(rows[-3:]):
            near = min(row, key=lambda j: abs(boxes[j][0] + boxes[j][2] - boxes[i][0] - boxes[i][2]))
            x0, y0 = np.maximum(boxes[i][:2], boxes[near][:2])
            x1, y1 = np.minimum(boxes[i][2:], boxes[near][2:])
            width, height = np.minimum(boxes[i][2:] - boxes[i][:2], boxes[near][2:] - boxes[near][:2])
            if x1 - x0 < 0.3 * width and y1 - y0 > 0.5 * height:
                row.append(i)
                break
        else:
            rows.append([i])
    return [i for row in rows for i in sorted(row, key=lambda i: boxes[i][0])]


def told(lines: list[dict[str, Any]], unread: int, target: Target, scene: Scene) -> str:
    """What the policy reads: one line each with its box in the policy's own numbers, cut at MAX_TEXT characters."""
    if not lines and not unread:
        return "no text found"
    told: list[str] = []
    size = 0
    for line in lines:
        box = scene.scale.around(tuple(min(max(v, 0.0), 1.0) for v in target.from_root(tuple(line["box"]))), target.id)
        entry = f"{','.join(map(str, box))} {line['text']}" + (" (?)" if line["confidence"] < UNSURE else "")
        if size + len(entry) > MAX_TEXT:
            if not told:
                told.append(entry[:MAX_TEXT] + "...")
            break
        told.append(entry)
        size += len(entry) + 1
    left_out = len(lines) - len(told) + unread
    if left_out:
        told.append(f"... and {left_out} more lines; zoom in to read them")
    return "\n".join(told)
