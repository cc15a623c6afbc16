"""Charts hold for any finite curve."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from pixelis.telemetry.html.charts import line_chart, nice_ticks

finite = st.floats(-1e12, 1e12, allow_nan=False) | st.floats(1e-15, 1e-9) | st.just(0.0)


@given(finite, finite)
@example(1e-15, 1.0000000000000003e-15)
@example(1e-15, 1.0000000000000002e-15)
def test_ticks_rise_and_enclose_the_values(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    slack = 1e-6 * (ticks[-1] - ticks[0])
    assert all(x < y for x, y in pairwise(ticks))
    assert len(ticks) >= 2
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack


@example([0.0, 5e-324])
@given(st.lists(finite, min_size=1, max_size=20))
def test_any_curve_can_be_drawn(values: list[float]) -> None:
    chart = line_chart({"curve": list(enumerate(values))})
    (line,) = chart.lines
    assert all(
        chart.left <= x <= chart.right and chart.top - 1 <= y <= chart.bottom + 1 for x, y in line.points
    )


@given(st.lists(st.tuples(finite, finite, finite).map(sorted), min_size=1, max_size=20))
def test_a_band_encloses_its_line_within_the_chart(rows: list[list[float]]) -> None:
    line = [(float(x), middle) for x, (_, middle, _) in enumerate(rows)]
    band = [(float(x), low, high) for x, (low, _, high) in enumerate(rows)]
    chart = line_chart({"curve": line, "other": line}, bands={"curve": band, "unknown": band})
    drawn, other = chart.lines
    assert other.band == []
    upper, lower = drawn.band[: len(rows)], drawn.band[len(rows) :][::-1]
    for (x, y), (x_high, high), (x_low, low) in zip(drawn.points, upper, lower, strict=True):
        assert x == x_high == x_low
        assert chart.top - 1 <= high <= y <= low <= chart.bottom + 1  # y grows downwards
