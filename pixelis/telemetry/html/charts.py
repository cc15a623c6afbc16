"""Geometry of line charts, which the template ``charts.html`` draws as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pixelis.telemetry.html.filters import number

Series = Sequence[tuple[float, float]]
Band = Sequence[tuple[float, float, float]]
"""(x, lowest, highest) of a line's values, in the order of x."""

WIDTH, HEIGHT = 420, 230
"""Drawing units; a chart is shown about this wide."""
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 34
MAX_POINTS = 300
TINY = 1e-290
"""Smaller differences count as 0: dividing them would underflow."""


@dataclass(frozen=True)
class Line:
    """A named line: points in drawing units, first and last value as text, and outline of its band."""

    name: str
    points: list[tuple[float, float]]
    first: str
    last: str
    band: list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines and ticks; a tick is its place in drawing units and its label."""

    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    width, height = WIDTH, HEIGHT


def line_chart(
    series: Mapping[str, Series], share: bool = False, bands: Mapping[str, Band] | None = None
) -> Chart | None:
    """Place named series of finite (x, y) points in a chart; None if every series is empty.

    ``share``: draw values in 0..1 from 0 to 100 %. ``bands``: ranges around lines of the same name.
    """
    lines = {name: sorted(points) for name, points in series.items() if points}
    if not lines:
        return None
    thinned = {name: _thin(points) for name, points in lines.items()}
    ranges = {name: band for name, band in (bands or {}).items() if name in lines}
    lows = {name: _thin([(x, low) for x, low, _ in band]) for name, band in ranges.items()}
    highs = {name: _thin([(x, high) for x, _, high in band]) for name, band in ranges.items()}
    xs = [x for points in thinned.values() for x, _ in points]
    ys = [y for drawn in (thinned, lows, highs) for points in drawn.values() for _, y in points]
    share = share and all(0 <= y <= 1 for y in ys)
    x_low, x_span = min(xs), (max(xs) - min(xs)) or 1.0
    y_ticks = [0.0, 0.25, 0.5, 0.75, 1.0] if share else nice_ticks(min(ys), max(ys))
    y_low, y_span = y_ticks[0], y_ticks[-1] - y_ticks[0]

    def at_x(x: float) -> float:
        return round(LEFT + (x - x_low) / x_span * (WIDTH - LEFT - RIGHT), 1)

    def at_y(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - y_low) / y_span * (HEIGHT - TOP - BOTTOM), 1)

    x_ticks = [tick for tick in nice_ticks(x_low, max(xs)) if x_low <= tick <= max(xs)] or [x_low]
    return Chart(
        lines=[
            Line(
                name,
                points=[(at_x(x), at_y(y)) for x, y in thinned[name]],
                first=number(points[0][1], share),
                last=number(points[-1][1], share),
                band=[(at_x(x), at_y(y)) for x, y in [*highs.get(name, []), *reversed(lows.get(name, []))]],
            )
            for name, points in lines.items()
        ],
        x_ticks=[(at_x(tick), number(tick)) for tick in x_ticks],
        y_ticks=[(at_y(tick), number(tick, share)) for tick in y_ticks],
    )


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """At least two round values at equal steps that enclose low..high."""
    largest = max(abs(low), abs(high))
    if not high - low > max(1e-9 * largest, TINY):  # equal within the twelve digits of a tick
        pad = 0.1 * abs(low) if largest > TINY else 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / about
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Significant digits, not decimals: values may be as small as 1e-13.
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _thin(points: Series) -> list[tuple[float, float]]:
    run = -(-len(points) // MAX_POINTS)
    chunks = [points[i : i + run] for i in range(0, len(points), run)]
    return [
        (sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks
    ]
