"""Line charts as inline SVG: no script, no network, colours from the page's style so that they fit light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pixelis.telemetry.words import number, safe

Series = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 420, 230
"""Drawing units. A chart is shown about this wide, so that its text keeps its size on a phone and on a desktop."""
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 34
COLOURS = 6
MAX_POINTS = 300


def line_chart(series: Mapping[str, Series], *, share: bool = False, x_label: str = "step") -> str:
    """One SVG with a line for each named series of finite (x, y) points; empty text when there is nothing to draw.

    `share`: y is a share, drawn from 0 to 100 %. Lines of more than 300 points are averaged in equal runs. Each line has a
    class `c0` to `c5` in order, which `legend` names.
    """
    lines = {name: _thin(points) for name, points in series.items() if points}
    if not lines:
        return ""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    x_low, x_high = min(xs), max(xs)
    x_span = (x_high - x_low) or 1.0
    if share and min(ys) >= 0 and max(ys) <= 1:
        y_ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
    else:
        share = False
        y_ticks = nice_ticks(min(ys), max(ys))
    y_low, y_span = y_ticks[0], y_ticks[-1] - y_ticks[0]

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(LEFT + (x - x_low) / x_span * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - (y - y_low) / y_span * (HEIGHT - TOP - BOTTOM), 1),
        )

    spoken = "; ".join(f"{name} from {number(p[0][1], share)} to {number(p[-1][1], share)}" for name, p in lines.items())
    out = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{safe(spoken)}">']
    for tick in y_ticks:
        _, y = place(x_low, tick)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{number(tick, share)}</text>')
    for tick in sorted({t for t in nice_ticks(x_low, x_high) if x_low <= t <= x_high} or {x_low}):
        x, _ = place(tick, y_low)
        out.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{number(tick)}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">{safe(x_label)}</text>')
    for i, (name, points) in enumerate(lines.items()):
        placed = [place(x, y) for x, y in points]
        path = " ".join(f"{x},{y}" for x, y in placed)
        out.append(f'<polyline class="c{i % COLOURS}" points="{path}"><title>{safe(name)}</title></polyline>')
        out.append(f'<circle class="c{i % COLOURS}" cx="{placed[-1][0]}" cy="{placed[-1][1]}" r="3.5"/>')
    out.append("</svg>")
    return "".join(out)


def legend(series: Mapping[str, Series], *, share: bool = False) -> str:
    """The names of a chart's lines with their colours and last values, as HTML."""
    drawn = {name: points for name, points in series.items() if points}
    share = share and all(0 <= y <= 1 for points in drawn.values() for _, y in points)
    items = [
        f'<li><i class="c{i % COLOURS}"></i>{safe(name)} <b>{number(points[-1][1], share)}</b></li>'
        for i, (name, points) in enumerate(drawn.items())
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round values at equal steps (1, 2 or 5 times a power of ten) that enclose low..high; at least two."""
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # equal, as far as ticks of twelve digits can tell
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / about
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Rounded to significant digits: a curve may live at 1e-13.
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _thin(points: Series) -> list[tuple[float, float]]:
    ordered = sorted(points)
    run = -(-len(ordered) // MAX_POINTS)
    if run <= 1:
        return ordered
    chunks = [ordered[i : i + run] for i in range(0, len(ordered), run)]
    return [(sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks]
