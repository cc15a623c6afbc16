"""Jobs as functions, `pixelis.sft`, `rft` and `evaluate`: the drivers of the commands, with their results.

``config`` is a YAML file, the name of a recipe (by default the command's), or a Config. Overrides are sections,
``rft={"steps": 5}``, or dotted keys, ``**{"rft.steps": 5}``; None restores a default. A failure raises its
PixelisError; Ctrl-C raises KeyboardInterrupt once the learner has saved its step. The local Ray cluster that the
first job starts lives as long as the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from pixelis.config import Config, absolute, load
from pixelis.config.load import Source
from pixelis.jobs import evaluate as evaluation
from pixelis.jobs import rft as rft_job
from pixelis.jobs import sft as sft_job
from pixelis.jobs.driver import typed_errors
from pixelis.jobs.watch import call_in_thread
from pixelis.telemetry import events


@dataclass(frozen=True)
class Result:
    """What a job has written to ``run_dir``.

    ``metrics``: a row for each step, also of resumed runs (docs/metrics.md), or for each set of an evaluation.
    ``checkpoint``: the one with the best evaluation, the last of a run without any; None from `evaluate`.
    """

    run_dir: Path
    metrics: pa.Table = field(repr=False)
    checkpoint: Path | None = None


def sft(config: Source = None, **overrides: Any) -> Result:
    """Supervised fine-tuning, as `pixelis sft`."""
    return _train("sft", "step/sft", sft_job.run, config, overrides)


def rft(config: Source = None, **overrides: Any) -> Result:
    """Reinforcement fine-tuning, as `pixelis rft`."""
    return _train("rft", "step/policy", rft_job.start, config, overrides)


def evaluate(config: Source = None, **overrides: Any) -> Result:
    """Evaluation on held-out questions, as `pixelis evaluate`."""
    resolved = _resolved("evaluate", config, overrides)
    with typed_errors():
        if resolved.evaluate.api.url is None:
            summaries = evaluation.start(resolved)
        else:  # it runs an event loop, which a notebook's thread has already
            summaries = call_in_thread(lambda: evaluation.start(resolved)).result()
    return Result(Path(resolved.run.dir), _table(summaries))


def _train(
    job: str, kind: str, start: Callable[[Config], Path], config: Source, overrides: Mapping[str, Any]
) -> Result:
    resolved = _resolved(job, config, overrides)
    with typed_errors():
        last = start(resolved)
    folder, steps = Path(resolved.run.dir), dict[int, dict[str, Any]]()
    for event in events.read(folder):
        if event.pop("kind") in (kind, "evaluation"):
            steps.setdefault(event["step"], {}).update(event)
    best = folder / "best"
    metrics = _table([steps[step] for step in sorted(steps)])
    return Result(folder, metrics, best.resolve() if best.exists() else last)


def _resolved(job: str, config: Source, overrides: Mapping[str, Any]) -> Config:
    return absolute(load(config or f"configs/nano/{job}.yaml", overrides))


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The single values of rows by name; null where a row has none."""
    names = dict.fromkeys(k for row in rows for k, v in row.items() if isinstance(v, int | float | str))
    return pa.table({name: [row.get(name) for row in rows] for name in names})
