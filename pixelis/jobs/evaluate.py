"""Evaluate a policy on held-out questions with complete episodes.

Prints accuracy with its 95 % interval, the rate of pixel reasoning, the tool error rate and the mean number of turns; writes
evaluation.json, trajectories.jsonl and report.html to run.dir.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from pixelis.actors import placement, report
from pixelis.config import Config, from_command_line
from pixelis.datasets.questions import read_questions
from pixelis.errors import DataFailure
from pixelis.evaluation.metrics import correctness, summarise
from pixelis.jobs.driver import driver, run_folder, watch
from pixelis.jobs.dry_run import checks
from pixelis.records import Group
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
        count = sum(1 for _ in read_questions(source, limit=count, epochs=1))

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
    summary = {"name": name, **summarise(groups)}
    EventLog(config.run.dir).write("evaluate", version=version, source=source, tools=operations, **summary)
    return Arm(name, summary, correctness(groups), groups, views)


def save(folder: Path, arm: Arm) -> None:
    """Write ``trajectories-NAME.jsonl``, one group per line."""
    with (folder / f"trajectories-{arm.name}.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(group.model_dump_json() + "\n" for group in arm.groups)


def main() -> None:
    """Entry point of `python -m pixelis.jobs.evaluate`."""
    config = from_command_line(__doc__, "evaluate", default="configs/nano/evaluate.yaml", check=checks("evaluate"))
    with (
        driver("evaluate"),
        run_folder(config, config.data.evaluate) as folder,
        placement.placed(config, learner=False, initial=config.policy.adapter) as actors,
    ):
        arm = measure(config, actors, config.run.name, 0, operations=config.evaluate.operations)
        save(folder, arm)
        (folder / "evaluation.json").write_text(json.dumps(arm.summary, indent=2), encoding="utf-8")
        lineage.record_in_run(folder / "evaluation.json", "evaluation")
        episodes = report.choose(arm.name, arm.groups, arm.views, config.evaluate.trajectories)
        page = ray.get(report.write.remote(config, str(folder), {"arms": [arm.summary]}, [], episodes))
        if arm.summary["accuracy"] is None:
            causes = ", ".join(f"{cause} x{count}" for cause, count in arm.summary["unscored"].items())
            raise DataFailure(
                f"no episode could be scored ({causes})", fix=f"give the questions of {config.data.evaluate} answers"
            )
        low, high = arm.summary["ci95"]
        print(f"accuracy {arm.summary['accuracy']:.3f} [{low:.3f}, {high:.3f}] on {arm.summary['n']} questions")
        print(f"rate of pixel reasoning {arm.summary['rapr']:.3f}, tool errors {arm.summary['tool_error_rate']:.3f}")
        print(f"report: {page}")


if __name__ == "__main__":
    main()
