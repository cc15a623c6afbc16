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
    assert chart is not None
    (line,) = chart.lines
    assert all(chart.left <= x <= chart.right and chart.top - 1 <= y <= chart.bottom + 1 for x, y in line.points)
