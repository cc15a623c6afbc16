"""Evaluate a policy on held-out questions with complete episodes.

Prints accuracy with its 95 % interval, the rate of pixel reasoning, the tool error rate and the mean number of turns; writes
evaluation.json, trajectories-NAME.jsonl and report.html to run.dir. `evaluate.samples` adds avg@k, pass@k and maj@k,
`evaluate.sets` evaluates several sets by name. `evaluate.answers` scores another model's answers from a file instead of a policy
and writes NAME_with_score.json.
"""

from __future__ import annotations

import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from pyarrow import fs

from pixelis.actors import placement, report
from pixelis.config import Config, from_command_line
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.files import Row as FileRow
from pixelis.datasets.files import read_file
from pixelis.datasets.labels import drop_labels
from pixelis.datasets.questions import read_questions
from pixelis.errors import BadInput, DataFailure
from pixelis.evaluation import foreign_answers
from pixelis.evaluation.metrics import correctness, summarise
from pixelis.evaluation.samples import breakdown, sample_metrics
from pixelis.jobs.driver import driver, run_folder, watch
from pixelis.jobs.dry_run import checks
from pixelis.records import Group
from pixelis.rewards.extraction import answers_of
from pixelis.rewards.grader import Grader
from pixelis.rewards.services import shared_services
from pixelis.telemetry import lineage
from pixelis.telemetry.events import EventLog


@dataclass
class Arm:
    """One evaluated policy: its summary, correctness by question and the groups with references to their views."""

    name: str
    summary: dict[str, Any]
    correct: dict[str, float]
    groups: list[Group]
    views: list[ray.ObjectRef]


def measure(
    config: Config,
    actors: placement.Actors,
    name: str,
    version: int,
    *,
    operations: bool = True,
    source: str | None = None,
    samples: int = 1,
) -> Arm:
    """Evaluate policy ``version`` on ``source`` (default data.evaluate) with ``samples`` episodes per question.

    The correctness of a question is the mean over its episodes.
    """
    source = source or config.data.evaluate
    coordinator, count = actors.coordinator, config.evaluate.questions
    if not source.startswith("cards:"):  # `cards:` is endless
        on_labels = None if config.rewards.labelled else drop_labels
        count = sum(1 for _ in read_questions(source, limit=count, epochs=1, on_labels=on_labels))

    def poll() -> tuple[int, dict[str, Any]]:
        return ray.get(coordinator.progress.remote())["evaluated"].get(name, 0), {}

    groups, views = watch(
        config,
        f"evaluate {name}",
        count,
        lambda: ray.get(coordinator.evaluate.remote(source, count, version, operations, name, samples=samples)),
        poll,
        waiting="answering the first questions",
    )
    extra = {**breakdown(groups), **sample_metrics(groups, config.rewards, shared_services(config.rewards))}
    summary = {"name": name, **summarise(groups), **extra}
    EventLog(config.run.dir).write("evaluate", version=version, source=source, tools=operations, **summary)
    return Arm(name, summary, correctness(groups), groups, views)


def save(folder: Path, arm: Arm) -> None:
    """Write ``trajectories-NAME.jsonl``, one group per line."""
    with (folder / f"trajectories-{arm.name}.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(group.model_dump_json() + "\n" for group in arm.groups)


def score_answers(config: Config, folder: Path) -> dict[str, Any]:
    """Score the file `evaluate.answers` against data.evaluate; returns the summary."""
    assert config.evaluate.answers is not None
    path = Path(config.evaluate.answers)
    rows = [row.values if isinstance(row, FileRow) else _refuse(row) for row in read_file(fs.LocalFileSystem(), str(path))]
    questions = list(read_questions(config.data.evaluate, limit=config.evaluate.questions, epochs=1))
    groups = foreign_answers.episodes(rows, questions)
    grader = Grader(config.rewards, folder)
    try:
        with ThreadPoolExecutor(4) as pool:
            scored = list(pool.map(grader.score, groups))
        extra = {**breakdown(scored), **sample_metrics(scored, config.rewards, grader.services)}
        trajectories = [t for group in scored for t in group.trajectories]
        answers = answers_of(trajectories, config.rewards, grader.services)
    finally:
        grader.close()
    output = folder / f"{path.stem}_with_score.json"
    output.write_text(
        json.dumps(foreign_answers.with_scores(rows, scored, answers), indent=2, ensure_ascii=False), encoding="utf-8"
    )
    return {"name": path.stem, **summarise(scored), **extra}


def _refuse(row: BadRow) -> dict[str, Any]:
    raise BadInput(f"{row.file}, row {row.row}: {row.message}", code=row.code, fix="correct the row")


def show(summary: dict[str, Any]) -> None:
    """Print a summary; DataFailure if no episode was scored."""
    if summary["accuracy"] is None:
        causes = ", ".join(f"{cause} x{count}" for cause, count in summary["unscored"].items())
        raise DataFailure(f"{summary['name']}: no episode could be scored ({causes})", fix="give the questions answers")
    low, high = summary["ci95"]
    print(f"{summary['name']}: accuracy {summary['accuracy']:.3f} [{low:.3f}, {high:.3f}] on {summary['n']} episodes")
    if "k" in summary:
        print("  " + ", ".join(f"{name} {summary[name]:.3f}" for name in ("avg@k", "pass@k", "maj@k")) + f", k = {summary['k']}")
    for name in ("with_operations", "without_operations"):
        if (part := summary[name])["n"] and part["n"] < summary["n"]:
            print(f"  {name.replace('_', ' ')}: {part['accuracy']:.3f} on {part['n']}")
    for part in ("splits", "tasks", "categories"):
        for value, scores in summary.get(part, {}).items():
            if scores["n"]:
                print(f"  {value}: {scores['accuracy']:.3f} on {scores['n']}")
    print(f"  rate of pixel reasoning {summary['rapr']:.3f}, tool errors {summary['tool_error_rate']:.3f}")


def main() -> None:
    """Entry point of `python -m pixelis.jobs.evaluate`."""
    config = from_command_line(__doc__, "evaluate", default="configs/nano/evaluate.yaml", check=checks("evaluate"))
    if config.evaluate.answers is not None:
        with driver("evaluate"):
            folder = Path(config.run.dir)
            folder.mkdir(parents=True, exist_ok=True)
            summary = score_answers(config, folder)
            (folder / "evaluation.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
            show(summary)
            return
    sets = config.evaluate.sets or {config.run.name: config.data.evaluate}
    with (
        driver("evaluate"),
        run_folder(config, *sets.values()) as folder,
        placement.placed(config, learner=False, initial=config.policy.adapter) as actors,
    ):
        e, arms = config.evaluate, []
        for name, source in sets.items():
            arms.append(measure(config, actors, name, 0, operations=e.operations, source=source, samples=e.samples))
            save(folder, arms[-1])
        summaries = [arm.summary for arm in arms]
        accuracies = [s["accuracy"] for s in summaries if s["accuracy"] is not None]
        mean = statistics.fmean(accuracies) if accuracies else None
        result = {"sets": summaries, "mean": mean} if config.evaluate.sets else summaries[0]
        (folder / "evaluation.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
        lineage.record_in_run(folder / "evaluation.json", "evaluation")
        first = arms[0]
        episodes = report.choose(first.name, first.groups, first.views, e.trajectories)
        page = ray.get(report.write.remote(config, str(folder), {"arms": summaries}, [], episodes))
        for summary in summaries:
            show(summary)
        if config.evaluate.sets:
            print(f"mean over {len(accuracies)} sets {mean:.3f}")
        print(f"report: {page}")


if __name__ == "__main__":
    main()
