"""The report of a run: one HTML file with results, learning curves and episodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pixelis.telemetry import diagnosis
from pixelis.telemetry.events import as_number, plain
from pixelis.telemetry.html.charts import Series
from pixelis.telemetry.html.episode import EpisodePage
from pixelis.telemetry.html.render import render, write_page
from pixelis.telemetry.progress import clock

FILE = "report.html"
STAGES = {"step/sft": "sft", "step/policy": "rft"}
"""Kind of the events that are training steps -> their stage."""
SHARES = {"accuracy": "", "rapr": "rate of pixel reasoning", "tool_error_rate": "tool error rate"}
"""Metrics that are shares of episodes -> their name in words, where the metric's name needs one."""


@dataclass(frozen=True)
class Result:
    """Accuracy of one arm with its interval, and its use of operations; None where a value is unknown."""

    name: str
    accuracy: float | None
    interval: Sequence[float] | None
    rapr: float | None
    tool_error_rate: float | None
    questions: Any
    causes: Mapping[str, int]
    """Number of wrong episodes by cause."""

    @property
    def bar(self) -> tuple[float, float, float]:
        """Width of the bar, left end and width of the interval, in percent of the column."""
        low, high = self.interval or (0.0, 0.0)
        return 100 * (self.accuracy or 0.0), 100 * low, 100 * (high - low)


@dataclass(frozen=True)
class Figure:
    """Curves of one chart. ``kind`` selects its heading and caption: shares, rewards, loss or other."""

    kind: str
    series: Mapping[str, Series]


def write_report(
    run_dir: str | Path,
    summary: Mapping[str, Any],
    curves: Sequence[Mapping[str, Any]],
    episodes: Sequence[EpisodePage],
    title: str | None = None,
    file: str = FILE,
    examples: Mapping[str, Sequence[Sequence[EpisodePage]]] | None = None,
    compared: Sequence[Sequence[EpisodePage]] = (),
) -> Path:
    """Write `run_dir/report.html`, or ``file`` there, and return its path; see ``render_report``."""
    folder = Path(run_dir)
    document = render_report(summary, curves, episodes, title or folder.resolve().name, examples, compared)
    return write_page(folder / file, document)


def render_report(
    summary: Mapping[str, Any],
    curves: Sequence[Mapping[str, Any]],
    episodes: Sequence[EpisodePage],
    title: str = "run",
    examples: Mapping[str, Sequence[Sequence[EpisodePage]]] | None = None,
    compared: Sequence[Sequence[EpisodePage]] = (),
) -> str:
    """The document as text.

    - `summary`: any of `arms`, `paired`, `seconds`, `versions`, `seed`, `shift`, `served`, `hardware` and
      `command`, as in summary.json of the quickstart.
    - `curves`: one mapping per training step with `step`, `area/name` numbers and optionally `stage`.
    - `examples`: name of an arm -> wrong answers of each of its `clusters`.
    - `compared`: for each question one episode of several policies, whose name is its title.
    """
    facts = plain(summary)
    arms = facts.get("arms", [])
    results = [_result(arm) for arm in arms]
    stages: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in curves:
        stages[row.get("stage") or STAGES.get(row.get("kind", ""), "")].append(row)
    problems = {stage or "training": diagnosis.of_run(steps) for stage, steps in stages.items()}
    problems |= {arm["name"]: diagnosis.of_evaluation(arm) for arm in arms}
    clusters = {}  # arm -> its clusters with examples of wrong answers
    for arm in arms:
        if rows := arm.get("clusters"):
            pages = (examples or {}).get(arm["name"]) or [()] * len(rows)
            clusters[arm["name"]] = list(zip(rows, pages, strict=True))
    return render(
        "report.html",
        title=title,
        facts=facts,
        results=results,
        by_name={result.name: result for result in results if result.accuracy is not None},
        differences=_differences(facts.get("paired", {})),
        shift=_shift(facts["shift"]) if facts.get("shift") else None,
        clusters=clusters,
        problems=[(name, problem) for name, problem in problems.items() if problem],
        stages={stage: figures for stage, steps in stages.items() if (figures := _figures(steps))},
        episodes=episodes,
        compared=compared,
        seconds={name: clock(seconds) for name, seconds in facts.get("seconds", {}).items()},
    )


def _result(arm: Mapping[str, Any], name: str | None = None) -> Result:
    return Result(
        name=name or arm["name"],
        accuracy=arm.get("accuracy"),
        interval=arm.get("ci95"),
        rapr=arm.get("rapr"),
        tool_error_rate=arm.get("tool_error_rate"),
        questions=arm.get("n", "–"),
        causes=arm.get("error_causes") or {},
    )


def _differences(paired: Mapping[str, Any]) -> list[tuple[str, float, Sequence[float]]]:
    """Name, mean and interval of paired differences `{"rft_minus_sft": {"mean": ..., "ci95": [...]}}`."""
    return [(name.replace("_minus_", " minus "), of["mean"], of["ci95"]) for name, of in paired.items()]


def _shift(shift: Mapping[str, Any]) -> dict[str, Any]:
    """Results before and after adapting to changed pictures, their differences, and other facts."""
    arms = ("before", "after")
    paired = {key: value for key, value in shift.items() if "_minus_" in key}
    facts: dict[str, Any] = {}
    for key, value in shift.items():
        if key in arms or key in paired:
            continue
        name = key.replace("_", " ")
        if isinstance(value, dict):  # such as `replies right, first quarter`
            facts |= {f"{name}, {part.replace('_', ' ')}": item for part, item in value.items()}
        else:
            facts[name] = value
    results = [_result(shift[name], name) for name in arms]
    return {"results": results, "differences": _differences(paired), "facts": facts}


def _figures(steps: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """The important curves together, then a figure for each other curve."""
    series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in steps:
        for key, value in row.items():
            if "/" in key and (number := as_number(value)) is not None:
                series[key].append((row["step"], number))
    rewards = {key: points for key, points in series.items() if key.startswith("reward/")}
    shares = {key: points for key, points in series.items() if _name(key) in SHARES and key not in rewards}
    # A policy-gradient loss says nothing about quality, unlike that of demonstrations.
    losses = {} if rewards else {key: points for key, points in series.items() if _name(key) == "loss"}
    others = [{key: points} for key, points in series.items() if key not in {*shares, *rewards, *losses}]
    groups = [("shares", shares), ("rewards", rewards), ("loss", losses), *(("other", of) for of in others)]
    words = {key: SHARES.get(_name(key)) for key in series}
    labels = {key: f"{name} ({key})" if name else key for key, name in words.items()}
    return [
        Figure(kind, {labels[key]: points for key, points in group.items()})
        for kind, group in groups
        if group
    ]


def _name(key: str) -> str:
    return key.rsplit("/", 1)[-1]
