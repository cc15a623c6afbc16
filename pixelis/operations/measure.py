"""MEASURE: the length and angle of a line, the angle between two lines, or the straight lines in a region."""

from __future__ import annotations

import math
from typing import Any

import cv2
import numpy as np
from pydantic import Field, model_validator

from pixelis.errors import OperationError
from pixelis.operations.geometry import WHOLE, clamp
from pixelis.operations.operation import (
    BoxArgument,
    Operation,
    OperationArguments,
    PointArgument,
    Result,
    Scene,
    Target,
)
from pixelis.operations.pixel_budget import shrink
from pixelis.records import Box

MAX_SIDE = 1600
MAX_SEGMENTS = 500
LISTED, KEPT = 6, 30
NEAR, TURN = 6.0, 3.0
"""Pixels and degrees within which two segments are one line: a stroke has two edges."""
MIN_LENGTH = 0.08
"""Shortest line, as a share of the region's shorter side."""

Line = tuple[float, float, float, float]


class MeasureArguments(OperationArguments):
    point: PointArgument | None = Field(None, description="start of the line")
    end_point: PointArgument | None = Field(None, description="end of the line")
    vertex: PointArgument | None = Field(
        None, description="with both points: the corner whose angle to measure"
    )
    box: BoxArgument | None = Field(
        None, description="without points: the region whose straight lines to find"
    )

    @model_validator(mode="after")
    def _one_way(self) -> MeasureArguments:
        if (self.point is None) != (self.end_point is None) or (self.point is None) == (self.box is None):
            raise ValueError("give point and end_point (and vertex for an angle), or a box")
        if self.vertex is not None and self.point is None:
            raise ValueError("vertex needs point and end_point")
        points = [p for p in (self.point, self.end_point, self.vertex) if p]
        if len(set(points)) < len(points):
            raise ValueError("the points are the same")
        return self


class Measure(Operation):
    """Angles are in degrees counter-clockwise from right, lengths in full-resolution pixels."""

    name = "measure"
    description = (
        "Measure on an image: the length and angle of the line from point to end_point; the angle at "
        "vertex between them; or, with a box alone, the straight lines in it, longest first, with their "
        "angles. Shows what was measured."
    )
    Arguments = MeasureArguments

    @classmethod
    def run(cls, arguments: MeasureArguments, target: Target, scene: Scene) -> Result:
        """One drawn view, and the numbers.

        data: ``length`` in pixels, ``share`` of the target's width and height, ``direction`` (0..360);
        ``angle`` (0..180); or ``straight_lines``: [{"points", "length", "angle" (0..180)}].
        """
        if arguments.box is not None:
            box = clamp(arguments.box)
            text, data = _lines_in(box, target, scene)
            return Result(text, [scene.show(target, box, data)], data)
        ends = [arguments.point, *([arguments.vertex] if arguments.vertex else []), arguments.end_point]
        points = [list(target.to_root((*point, 1.0, 1.0))[:2]) for point in ends if point is not None]
        height, width = target.picture.shape[:2]
        (x0, y0), *corner, (x1, y1) = [(x * width, y * height) for x, y in points]
        if corner:
            ((x, y),) = corner
            angle = abs(_direction(x, y, x0, y0) - _direction(x, y, x1, y1))
            angle, arms = min(angle, 360 - angle), (math.hypot(x0 - x, y0 - y), math.hypot(x1 - x, y1 - y))
            text = f"angle {angle:.1f} deg; its sides are {arms[0]:.1f} and {arms[1]:.1f} px"
            label = f"{angle:.1f} deg"
            data = {"angle": round(angle, 2), "arms": [round(arm, 2) for arm in arms]}
        else:
            left, top, right, bottom = target.pixels()
            length, direction = math.hypot(x1 - x0, y1 - y0), _direction(x0, y0, x1, y1)
            shares = length / (right - left), length / (bottom - top)
            text = (
                f"length {length:.1f} px ({abs(x1 - x0):.1f} across, {abs(y1 - y0):.1f} down), "
                f"{100 * shares[0]:.1f} % of the width and {100 * shares[1]:.1f} % of the height of "
                f"{target.id}\ndirection {direction:.1f} deg counter-clockwise from right, "
                f"{(90 - direction) % 360:.1f} deg clockwise from up"
            )
            label = f"{length:.0f} px"
            data = {
                "length": round(length, 2),
                "share": [round(s, 4) for s in shares],
                "direction": round(direction, 2),
            }
        data["segments"] = [{"points": points, "label": label}]
        return Result(text, [scene.show(target, WHOLE, data)], data)


def _lines_in(box: Box, target: Target, scene: Scene) -> tuple[str, dict[str, Any]]:
    left, top, _, _ = target.pixels(box)
    lines = find_lines(target.crop(box))
    if not lines:
        raise OperationError(
            "no straight line there: take a larger region, or give two points", code="nothing_found"
        )
    height, width = target.picture.shape[:2]
    measured: list[dict[str, Any]] = []
    for x0, y0, x1, y1 in lines[:KEPT]:
        points = [[(left + x0) / width, (top + y0) / height], [(left + x1) / width, (top + y1) / height]]
        angle = round(_direction(x0, y0, x1, y1) % 180, 2)
        measured.append({"points": points, "length": round(math.hypot(x1 - x0, y1 - y0), 2), "angle": angle})
    listed = measured[:LISTED]
    plural = "s" if len(lines) > 1 else ""
    rows = [f"{len(lines)} straight line{plural} (angle counter-clockwise from right, 0..180), longest first"]
    for number, line in enumerate(listed, 1):
        ends = [target.from_root((*p, p[0] + 1, p[1] + 1))[:2] for p in line["points"]]
        start, end = (scene.scale.write(tuple(min(max(v, 0.0), 1.0) for v in p), target.id) for p in ends)
        rows.append(f"{number}: {line['length']:.1f} px, {line['angle']:.1f} deg, {start} to {end}")
    segments = [{"points": line["points"], "label": str(number)} for number, line in enumerate(listed, 1)]
    return "\n".join(rows), {"straight_lines": measured, "segments": segments}


def find_lines(pixels: np.ndarray) -> list[Line]:
    """Straight lines of uint8 [h, w, 3] in its pixels, longest first (LSD, von Gioi et al., 2010, joined)."""
    small = shrink(pixels, MAX_SIDE)
    detected = cv2.createLineSegmentDetector().detect(cv2.cvtColor(small, cv2.COLOR_RGB2GRAY))[0]
    if detected is None:
        return []
    segments = np.asarray(detected, np.float64).reshape(-1, 4)
    lengths = np.hypot(segments[:, 2] - segments[:, 0], segments[:, 3] - segments[:, 1])
    order = np.argsort(-lengths, kind="stable")[:MAX_SEGMENTS]
    joined: list[Line] = []
    for segment in segments[order].tolist():
        for number, line in enumerate(joined):
            if (longer := _join(line, tuple(segment))) is not None:
                joined[number] = longer
                break
        else:
            joined.append(tuple(segment))
    scale = pixels.shape[1] / small.shape[1]
    shortest = max(8.0, MIN_LENGTH * min(small.shape[:2]))
    lines = [line for line in joined if math.dist(line[:2], line[2:]) >= shortest]
    lines.sort(key=lambda line: -math.dist(line[:2], line[2:]))
    return [tuple(value * scale for value in line) for line in lines]


def _join(line: Line, segment: Line) -> Line | None:
    """One line for both if the segment continues the line or is the other edge of its stroke, else None."""
    length = math.dist(line[:2], line[2:])
    ux, uy = (line[2] - line[0]) / length, (line[3] - line[1]) / length
    ends = [(x - line[0], y - line[1]) for x, y in (segment[:2], segment[2:])]
    across = [uy * x - ux * y for x, y in ends]
    along = [ux * x + uy * y for x, y in ends]
    gap = max(min(along) - length, -max(along), 0.0)
    turn = abs(_direction(*line) - _direction(*segment)) % 180
    if min(turn, 180 - turn) > TURN or max(map(abs, across)) > NEAR or gap > max(6.0, 0.05 * length):
        return None
    low, high = min(0.0, *along), max(length, *along)
    # The other edge of a stroke moves the line to the middle; a short continuation barely moves it.
    shift = (across[0] + across[1]) / 2 * min(0.5, (max(along) - min(along)) / (2 * length))
    x, y = line[0] + uy * shift, line[1] - ux * shift
    return x + ux * low, y + uy * low, x + ux * high, y + uy * high


def _direction(x0: float, y0: float, x1: float, y1: float) -> float:
    """Degrees counter-clockwise from right, 0..360."""
    return math.degrees(math.atan2(y0 - y1, x1 - x0)) % 360
