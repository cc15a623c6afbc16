"""Evaluate a policy on held-out questions with complete episodes.

Prints accuracies with their 95 % intervals, of the whole and by category, the rate of pixel reasoning and the tool
error rate; writes evaluation.json, scores-NAME.jsonl (by question), trajectories-NAME.jsonl and report.html to
run.dir. Instead of a policy, `evaluate.api` evaluates any model behind an OpenAI-compatible address, and
`evaluate.answers` scores another model's answers from a file and writes NAME_with_score.json. `evaluate.baseline`
compares with another evaluation, `evaluate.published` with published figures.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from pixelis.actors import evaluation_report, placement, report, reservations
from pixelis.config import Config
from pixelis.datasets.labels import drop_labels
from pixelis.datasets.questions import read_questions
from pixelis.errors import DataFailure
from pixelis.evaluation import published, table
from pixelis.evaluation.clusters import require_questions
from pixelis.jobs import dry_run
from pixelis.jobs.driver import job, make_run_dir, run_folder
from pixelis.jobs.evaluate_api import answer_rows, evaluate_api, score_answers
from pixelis.jobs.evaluation_arms import (
    Arm,
    check_baseline,
    compare_with_published,
    evaluate_sets,
    read_published,
    summary_of,
)
from pixelis.jobs.watch import watch_evaluation
from pixelis.rewards.llm_client import LlmClient
from pixelis.rewards.services import shared_services
from pixelis.telemetry import diagnosis, lineage
from pixelis.telemetry.events import EventLog


def measure(
    config: Config,
    actors: placement.Actors,
    name: str,
    version: int,
    *,
    operations: bool = True,
    source: str | None = None,
    samples: int = 1,
    seeds: Sequence[int] = (),
) -> Arm:
    """Evaluate policy ``version`` on ``source`` (default data.evaluate): ``samples`` episodes per question and seed."""
    source = source or config.data.evaluate
    count, truncated = config.evaluate.questions, False
    if not source.startswith("cards:"):  # `cards:` is endless
        on_labels = None if config.rewards.labelled else drop_labels
        rows = read_questions(source, limit=count and count + 1, epochs=1, on_labels=on_labels)
        total = sum(1 for _ in rows)
        truncated, count = 0 < count < total, min(total, count or total)
        require_questions(count, config.evaluate.clusters, source)
    total, request = count * max(1, len(seeds)), (source, count, version, operations)
    groups, views = watch_evaluation(
        config, actors.coordinator, name, total, *request, samples=samples, seeds=seeds
    )
    summary = summary_of(config, name, groups, shared_services(config.rewards), seeds, samples)
    summary |= {"truncated": True} if truncated else {}
    EventLog(config.run.dir).write("evaluate", version=version, source=source, tools=operations, **summary)
    return Arm(name, summary, groups, views)


def evaluate_policy(
    config: Config,
    folder: Path,
    max_pixels: int | None,
    previous: list[dict[str, Any]],
    actors: placement.Actors,
    version: int,
) -> list[dict[str, Any]]:
    """Evaluate a policy version on each set; returns ``previous`` and the new summaries, which the report shows."""
    e = config.evaluate

    def measure_set(name: str, source: str, operations: bool) -> Arm:
        options: dict[str, Any] = {"operations": operations, "samples": e.samples, "seeds": e.seeds}
        return measure(config, actors, name, version, source=source, **options)

    arms = evaluate_sets(config, folder, max_pixels, measure_set, config.toolbox.has_tools)
    examples: dict[str, list[list[report.Chosen]]] = {}
    for arm in arms if e.clusters else ():
        arm.summary["clusters"] = clusters = evaluation_report.find_clusters(
            config, actors.embedder, arm.groups, arm.views
        )
        examples[arm.name] = evaluation_report.choose_wrong(clusters, arm.groups, arm.views)
    first, summaries = arms[0], [*previous, *(arm.summary for arm in arms)]
    episodes = evaluation_report.choose_with_causes(
        first.name, first.groups, first.views, config.telemetry.trajectories
    )
    page = ray.get(report.write.remote(config, str(folder), {"arms": summaries}, [], episodes, examples))
    print(f"report: {page}")
    return summaries


def show(summary: dict[str, Any]) -> None:
    """Print a summary; DataFailure if no episode was scored."""
    if summary["accuracy"] is None:
        causes = ", ".join(f"{cause} x{count}" for cause, count in summary["unscored"].items())
        raise DataFailure(
            f"{summary['name']}: no episode could be scored ({causes})", fix="give the questions answers"
        )
    print("\n".join(table.lines(summary)))
    if problem := diagnosis.of_evaluation(summary):
        print(f"warning: {problem}", file=sys.stderr, flush=True)


def mean_accuracy(summaries: list[dict[str, Any]]) -> float | None:
    accuracies = [summary["accuracy"] for summary in summaries if summary["accuracy"] is not None]
    return statistics.fmean(accuracies) if accuracies else None


def run(config: Config, actors: placement.Actors | None = None, version: int = 0) -> list[dict[str, Any]]:
    """Evaluate on every set with every pixel budget; writes all results to run.dir, prints and returns the summaries.

    ``actors`` of a training run evaluate its policy ``version``; by default they are placed for `policy.adapter`.
    """
    check_comparisons(config)
    e, summaries = config.evaluate, list[dict[str, Any]]()
    budgets: list[int | None] = list(dict.fromkeys(e.max_pixels)) or [None]
    with run_folder(config, held_out=list(config.held_out.values()), has_policy=e.api.url is None) as folder:
        for max_pixels in budgets:
            dialogue = config.dialogue if max_pixels is None else config.dialogue.with_max_pixels(max_pixels)
            arm_config = config.changed({"dialogue": dialogue})
            if e.api.url is not None:
                summaries = evaluate_api(arm_config, folder, max_pixels, summaries)
            elif actors is not None:
                summaries = evaluate_policy(arm_config, folder, max_pixels, summaries, actors, version)
            else:
                with placement.placed(arm_config, learner=False, initial=config.policy.adapter) as own:
                    summaries = evaluate_policy(arm_config, folder, max_pixels, summaries, own, 0)
        result: dict[str, Any] = summaries[0]
        if e.max_pixels:
            means = {str(n): mean_accuracy([s for s in summaries if s["max_pixels"] == n]) for n in budgets}
            result = {"sets": summaries, "mean_by_max_pixels": means}
        elif e.sets:
            result = {"sets": summaries, "mean": mean_accuracy(summaries)}
        result = write_result(config, folder, result, summaries)
        lineage.record_in_run(folder / "evaluation.json", "evaluation")
        for summary in summaries:
            show(summary)
        if e.sets and not e.max_pixels:
            print(f"mean over {len(summaries)} sets {result['mean']:.3f}")
        for n, mean in result.get("mean_by_max_pixels", {}).items():
            print(f"{n} pixels: accuracy {mean:.3f}")
        show_published(result)
    return summaries


def check_comparisons(config: Config) -> None:
    """Read what the evaluation is compared with, before it begins; raises as its readers do."""
    check_baseline(config)
    if config.evaluate.published is not None:
        read_published(config.evaluate.published)


def write_result(
    config: Config, folder: Path, result: dict[str, Any], summaries: list[dict[str, Any]]
) -> dict[str, Any]:
    """Write evaluation.json; returns its content, with the comparison with `evaluate.published`."""
    if config.evaluate.published is not None:
        result = {**result, "published": compare_with_published(config.evaluate.published, folder, summaries)}
    (folder / "evaluation.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    return result


def show_published(result: dict[str, Any]) -> None:
    if "published" in result:
        print("\n".join(published.lines(result["published"])))


def needs(config: Config) -> list[reservations.Need]:
    return reservations.needs(config, learner=False, rollouts=True)


def inputs(config: Config) -> Iterator[dry_run.Input]:
    e, player = config.evaluate, None
    if e.api.url is None and e.answers is None:
        player = dry_run.player_of(config)
        yield from dry_run.policy_inputs(config)
    sources = config.held_out if e.answers is None else {"": config.data.evaluate}
    yield from dry_run.held_out_inputs(config, sources, player)
    if e.answers is not None:
        yield dry_run.Input("evaluate.answers", e.answers, lambda path: answer_rows(Path(path)))
    if e.baseline is not None:
        yield dry_run.Input("evaluate.baseline", e.baseline, lambda _: check_baseline(config))
    if e.published is not None:
        yield dry_run.Input("evaluate.published", e.published, read_published)


def check(config: Config) -> None:
    e = config.evaluate
    if e.answers is None and e.api.url is not None:
        LlmClient(e.api, "evaluate.api").close()  # raises without its model or key
    own = e.answers is None and e.api.url is None
    found = dry_run.findings(config, "evaluate", needs(config)) if own else ()
    dry_run.check("evaluate", config, inputs(config), found)


def start(config: Config) -> list[dict[str, Any]]:
    """`run`, or score the file `evaluate.answers`; returns the summaries."""
    if config.evaluate.answers is None:
        return run(config)
    check_comparisons(config)
    folder = make_run_dir(config)
    summary = score_answers(config, folder)
    result = write_result(config, folder, summary, [summary])
    show(summary)
    show_published(result)
    return [summary]


def main() -> None:
    with job("evaluate", __doc__, check) as config:
        start(config)


if __name__ == "__main__":
    main()
