"""The page of an ablation: arms, comparisons, and learning curves with bands over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.telemetry.html.render import render

SHARES = ("accuracy", "pass", "rapr")
"""Compared metrics that are shares of questions or episodes."""


def render_ablation(report: Mapping[str, Any], title: str, limits: str) -> str:
    """The document. ``report``: the content of report.json; ``limits``: what the ablation cannot see."""
    return render(
        "ablation.html",
        title=title,
        report=report,
        limits=limits,
        share=report["metric"] in SHARES,
        lines={metric: _columns(by_arm, 0, 1) for metric, by_arm in report["curves"].items()},
        bands={metric: _columns(by_arm, 0, 2, 3) for metric, by_arm in report["curves"].items()},
    )


def _columns(by_arm: Mapping[str, list[Any]], *columns: int) -> dict[str, list[tuple[float, ...]]]:
    return {arm: [tuple(row[i] for i in columns) for row in curve] for arm, curve in by_arm.items()}
