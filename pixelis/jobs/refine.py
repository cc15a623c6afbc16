"""Refine demonstrations into training sets: rules, quality, duplicates, filters, difficulty, gates, recipes.

Reads data.demonstrations (a file or folder of rows, or `cards:`) and writes to run.dir:

  simple.jsonl, medium.jsonl, hard.jsonl   demonstrations by level
  sft.jsonl, sft_validation.jsonl          demonstrations to imitate, by refinement.sft
  rft.jsonl                                questions to roll out, by refinement.rft
  summary.json, card.html                  counts, causes of drops, gates with figures, examples

A set that fails a gate is not written: the job ends with the gate's name, its figure and the ids. A repeated or
killed run continues with its verdicts, hashes and episodes. A cluster is started only for refinement.workers
and refinement.pass_rate.episodes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pixelis.config import Config
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.refinement import data_card, gates, sets
from pixelis.datasets.refinement.episodes import Episodes
from pixelis.datasets.refinement.pipeline import Pipeline, records
from pixelis.datasets.refinement.row_checks import CheckedRow
from pixelis.errors import BadInput
from pixelis.files import write_json
from pixelis.jobs import dry_run
from pixelis.jobs.driver import job, run_folder
from pixelis.jobs.watch import watch_evaluation
from pixelis.rewards.services import Services
from pixelis.telemetry import lineage
from pixelis.telemetry.progress import StepProgress

EXAMPLES = 12
"""Demonstrations with pictures on the card."""


def run(config: Config) -> dict[str, Any]:
    """Refine, write the sets and the card; returns the summary. DataFailure for a rejected set."""
    s = config.refinement
    inputs = {"demonstrations": config.data.demonstrations}
    inputs |= {f"held_out_{number}": source for number, source in enumerate(s.holdout.sources)}
    with run_folder(config, sources=inputs) as folder:
        for name in (*sets.FILES, "summary.json"):  # results of another configuration must not remain
            (folder / name).unlink(missing_ok=True)
        services, steps = Services(config.rewards, folder), StepProgress("refine", config.telemetry.progress)
        pipeline: Pipeline | None = None
        try:
            pipeline = Pipeline(config, folder, services, steps)
            pipeline.prepare(_checked_by_workers(config, folder) if s.workers else None)
            steps.close()
            outcomes, rate = None, s.pass_rate
            if rate.episodes:
                episodes = Episodes(
                    config,
                    folder,
                    pipeline.questions(),
                    rate.episodes,
                    glance=rate.utility,
                    annotated=rate.annotated,
                )
                play(episodes)
                outcomes = episodes.outcomes()
            pipeline.finish(outcomes)
            return save(config, folder, pipeline)
        finally:
            steps.close()
            if pipeline is not None:
                pipeline.close()
            services.close()


def _checked_by_workers(config: Config, folder: Path) -> Iterator[CheckedRow | BadRow]:
    from pixelis.actors.cluster import connect, unwrap_ray_error
    from pixelis.datasets.refinement.row_stream import checked_rows

    connect(config)
    try:
        yield from checked_rows(config, folder)
    except Exception as error:
        raise unwrap_ray_error(error) or error from None


def play(episodes: Episodes) -> None:
    """Let the policy play the missing episodes, for which a cluster is started."""
    from pixelis.actors import placement

    config, count = episodes.config, episodes.count
    if missing := episodes.missing():
        with placement.placed(config, learner=False, initial=config.policy.adapter) as actors:
            for arm in missing:
                request = str(episodes.sources[arm]), count, 0, episodes.arms[arm]
                options = {"samples": episodes.samples}
                groups, _ = watch_evaluation(config, actors.coordinator, arm, count, *request, **options)
                episodes.store(arm, groups)


def save(config: Config, folder: Path, pipeline: Pipeline) -> dict[str, Any]:
    files, statistics = sets.build(pipeline)
    summary = {
        **pipeline.summary(),
        "config_sha256": config.sha256,
        "seed": config.run.seed,
        "sets": statistics,
    }
    selected = sets.examples(pipeline.demonstrations, EXAMPLES)
    examples = [data_card.example(d, config.toolbox, config.dialogue.frames) for d in selected]
    data_card.write_card(folder, summary, examples, config.run.name)
    is_rejected = any(not gate.passed for gate in pipeline.gates)
    write_json(folder / ("rejected.json" if is_rejected else "summary.json"), summary)
    print(f"kept {summary['kept']} of {summary['rows']} rows; dropped {_listed(summary['dropped'])}")
    if "pass_rate" in summary:
        print(f"pass rates: {_listed(summary['pass_rate'])}")
    gates.enforce(pipeline.gates)
    (folder / "rejected.json").unlink(missing_ok=True)
    for name, rows in files.items():
        sets.write_rows(folder / name, rows)
        lineage.record_in_run(folder / name, "dataset")
    return summary


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{cause} {n}" for cause, n in counts.items()) or "nothing"


def inputs(config: Config) -> Iterator[dry_run.Input]:
    yield from dry_run.policy_inputs(config)
    for source in config.refinement.holdout.sources:
        yield dry_run.Input(
            "refinement.holdout.sources", source, functools.partial(dry_run.read_first, config, held_out=True)
        )
    yield dry_run.Input("data.demonstrations", config.data.demonstrations, lambda _: _read_row(config))


def _read_row(config: Config) -> None:
    if next(iter(records(config)), None) is None:
        raise BadInput("holds no row", fix="see docs/data.md for the rows")


def check(config: Config) -> None:
    dry_run.check("refine", config, inputs(config))


def main() -> None:
    with job("refine", __doc__, check) as config:
        summary = run(config)
        for name, row in summary["sets"].items():
            short = f", {row['short']} short" if row["short"] else ""
            print(
                f"{name}: {row['count']} of {row['size']}{short}, dropped {_listed(row.get('dropped', {}))}"
            )
        print(f"card: {Path(config.run.dir) / data_card.FILE}")


if __name__ == "__main__":
    main()
