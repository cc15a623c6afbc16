"""The report of a run: one HTML file with results, learning curves and episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pixelis.telemetry import diagnosis
from pixelis.telemetry.events import as_number, plain
from pixelis.telemetry.html.charts import Series
from pixelis.telemetry.html.details import mappings
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
    interval: tuple[float, float] | None
    rapr: float | None
    tool_error_rate: float | None
    called: bool
    questions: Any
    causes: dict[str, Any]
    """Number of wrong episodes by cause."""

    @property
    def bar(self) -> tuple[float, float, float]:
        """Width of the bar, left end and width of the interval, in percent of the column."""
        low, high = self.interval or (0.0, 0.0)
        value, low, high = (100 * min(1.0, max(0.0, share)) for share in (self.accuracy or 0.0, low, high))
        return value, low, high - low


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
) -> Path:
    """Write `run_dir/report.html`, or ``file`` there, and return its path; see ``render_report``."""
    folder = Path(run_dir)
    return write_page(
        folder / file, render_report(summary, curves, episodes, title or folder.resolve().name, examples)
    )


def render_report(
    summary: Mapping[str, Any],
    curves: Sequence[Mapping[str, Any]],
    episodes: Sequence[EpisodePage],
    title: str = "run",
    examples: Mapping[str, Sequence[Sequence[EpisodePage]]] | None = None,
) -> str:
    """The document as text.

    - `summary`: the content of `summary.json`: `arms`, `paired`, `seconds`, `versions`, `seed` and, where
      known, `shift` (`{"before": {...}, "after": {...}}`, each like an arm, paired differences and other
      facts), `served` (a reply), `hardware` (text or mapping) and `command`. The page leaves out what is
      absent.
    - `curves`: one mapping per training step with `step`, `area/name` numbers and optionally `stage` (`sft`,
      `rft`). A value that is missing or not finite is a gap.
    - `episodes`: shown in order with their pictures.
    - `examples`: name of an arm -> wrong answers of each of its `clusters`.
    """
    facts = plain(summary)
    arms = mappings(facts.get("arms"))
    results = [_result(arm) for arm in arms]
    stages: dict[str, list[Mapping[str, Any]]] = {}
    for row in curves:
        stages.setdefault(str(row.get("stage") or STAGES.get(str(row.get("kind")), "")), []).append(row)
    diagnoses = [(stage or "training", diagnosis.of_run(steps)) for stage, steps in stages.items()]
    diagnoses += [(str(arm.get("name", "")), diagnosis.of_evaluation(arm)) for arm in arms]
    clusters = {}  # arm -> its clusters with examples of wrong answers
    for arm in arms:
        if of_arm := mappings(arm.get("clusters")):
            pages = (examples or {}).get(arm["name"]) or [()] * len(of_arm)
            clusters[arm["name"]] = list(zip(of_arm, pages, strict=True))
    shift, seconds = facts.get("shift"), facts.get("seconds") or {}
    return render(
        "report.html",
        title=title,
        facts=facts,
        results=results,
        by_name={result.name: result for result in results if result.accuracy is not None},
        differences=_differences(facts.get("paired")),
        shift=_shift(shift) if isinstance(shift, dict) and "before" in shift and "after" in shift else None,
        clusters=clusters,
        problems=[(name, problem) for name, problem in diagnoses if problem],
        stages={stage: figures for stage, steps in stages.items() if (figures := _figures(steps))},
        episodes=episodes,
        seconds={
            name: clock(took) for name, value in seconds.items() if (took := as_number(value)) is not None
        },
    )


def _result(arm: Mapping[str, Any], name: str | None = None) -> Result:
    calls = arm.get("operations")
    rapr = as_number(arm.get("rapr"))
    errors = as_number(arm.get("tool_error_rate"))
    return Result(
        name=str(arm.get("name", "")) if name is None else name,
        accuracy=as_number(arm.get("accuracy")),
        interval=_interval(arm.get("ci95")),
        rapr=rapr,
        tool_error_rate=errors,
        called=bool(rapr or errors) if calls is None else calls != 0,
        questions=arm.get("n", "–"),
        causes=causes if isinstance(causes := arm.get("error_causes"), dict) else {},
    )


def _interval(value: Any) -> tuple[float, float] | None:
    ends = [as_number(end) for end in value] if isinstance(value, list) else []
    return (ends[0], ends[1]) if len(ends) == 2 and ends[0] is not None and ends[1] is not None else None


def _differences(paired: Any) -> list[tuple[str, float | None, tuple[float, float] | None]]:
    """Name, mean and interval of paired differences `{"rft_minus_sft": {"mean": ..., "ci95": [...]}}`."""
    return [
        (
            name.replace("_minus_", " minus "),
            as_number(difference.get("mean")),
            _interval(difference.get("ci95")),
        )
        for name, difference in (paired.items() if isinstance(paired, dict) else ())
        if isinstance(difference, dict)
    ]


def _shift(shift: Mapping[str, Any]) -> dict[str, Any]:
    """Results before and after adapting to changed pictures, their differences, and other facts."""
    arms = {
        name: shift[name] if isinstance(shift[name], dict) else {"accuracy": shift[name]}
        for name in ("before", "after")
    }
    paired = {key: value for key, value in shift.items() if "_minus_" in key and isinstance(value, dict)}
    facts: dict[str, Any] = {}
    for key, value in shift.items():
        if key not in (*arms, *paired):
            name = key.replace("_", " ")
            parts = value.items() if isinstance(value, dict) else ()
            nested = {f"{name}, {part.replace('_', ' ')}": item for part, item in parts}
            facts |= nested or {name: value}  # such as `replies right, first quarter`
    results = [_result(arm, name) for name, arm in arms.items()]
    return {"results": results, "differences": _differences(paired), "facts": facts}


def _figures(steps: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """The important curves together, then a figure for each other curve, over the step or row number."""
    series: dict[str, list[tuple[float, float]]] = {}
    for number, row in enumerate(steps):
        step = as_number(row.get("step"))
        for key, value in row.items():
            if "/" in key and (y := as_number(value)) is not None:
                series.setdefault(key, []).append((float(number) if step is None else step, y))
    shares = {
        key: points
        for key, points in series.items()
        if _name(key) in SHARES and not key.startswith("reward/")
    }
    if not any(_name(key) == "accuracy" for key in shares) and "reward/accuracy" in series:
        shares = {"reward/accuracy": series["reward/accuracy"], **shares}
    rewards = {key: points for key, points in series.items() if key.startswith("reward/")}
    # A policy-gradient loss says nothing about quality, so the loss is important only where nothing else is
    # known.
    losses = (
        {key: points for key, points in series.items() if _name(key) == "loss"}
        if not shares and not rewards
        else {}
    )
    important = {"shares": shares, "rewards": rewards, "loss": losses}
    others = [{key: points} for key, points in series.items() if key not in {*shares, *rewards, *losses}]
    words = {key: SHARES.get(_name(key)) for key in series}
    labels = {key: f"{name} ({key})" if name else key for key, name in words.items()}
    return [
        Figure(kind, {labels[key]: points for key, points in group.items()})
        for kind, group in [*important.items(), *(("other", other) for other in others)]
        if group
    ]


def _name(key: str) -> str:
    return key.rsplit("/", 1)[-1]
