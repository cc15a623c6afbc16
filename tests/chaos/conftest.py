"""Every fault test says which figure it reached: in the summary at the end, and as a property of the test in a JUnit file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

FIGURES: list[tuple[str, str]] = []


@pytest.fixture
def reached(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """``reached(detection_s=0.4)`` notes figures of this test."""

    def note(**figures: Any) -> None:
        for name, value in figures.items():
            record_property(name, value)
        shown = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        FIGURES.append((request.node.name, shown))

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The figures of all fault tests that ran."""
    if FIGURES:
        terminalreporter.section("faults: what was reached")
        for name, shown in FIGURES:
            terminalreporter.write_line(f"{name}: {shown}")
