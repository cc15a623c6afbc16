"""Create Chain-of-Thought-Action samples from annotated media: correct ones, traps and self-corrections.

Result: JSON lines in run.dir/samples (use them as data.demonstrations=RUN_DIR/samples) and run.dir/summary.json
with counts, causes of drops and missing samples. Re-running resumes.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

from pixelis.actors import cluster, synthesis
from pixelis.config import Config
from pixelis.datasets.synthesis.corrections import WAYS
from pixelis.datasets.synthesis.quota_scheduler import SHARD, QuotaScheduler, SourceRows, quotas
from pixelis.datasets.synthesis.tasks import TASKS, check_operations
from pixelis.errors import BadConfig, DataFailure
from pixelis.files import write_json
from pixelis.jobs import dry_run
from pixelis.jobs.driver import job, run_folder
from pixelis.operations import select
from pixelis.telemetry import lineage
from pixelis.telemetry.progress import Progress


def run(config: Config) -> dict[str, Any]:
    check(config)
    synthesis.sample_builder(config).close()  # raises for missing dependencies before a cluster starts
    sources = sorted({config.synthesis.datasources[quota.source].path for quota in quotas(config.synthesis)})
    with run_folder(config, *sources) as folder:
        if not config.run.resume:
            for name in ("rounds", "shards", "samples"):
                shutil.rmtree(folder / name, ignore_errors=True)
            (folder / "summary.json").unlink(missing_ok=True)
        scheduler = QuotaScheduler(folder, config.synthesis, config.run.seed)
        rows = SourceRows(config.synthesis, config.data.max_bad_rows, folder)
        before, started = scheduler.completed, time.monotonic()
        with Progress(
            "synthesize", scheduler.target, start=before, enabled=config.telemetry.progress
        ) as progress:
            progress.update(before, status="reading sources")
            while scheduler.completed < scheduler.target and (scheduler.left() or scheduler.plan(rows)):
                cluster.connect(config)
                outcomes = synthesis.outcomes(config, scheduler.left(), rows)
                while scheduler.completed < scheduler.target and (
                    shard := list(itertools.islice(outcomes, SHARD))
                ):
                    scheduler.commit(shard)
                    progress.update(
                        scheduler.completed,
                        attempts=sum(quota.attempts for quota in scheduler.quotas.values()),
                    )
        seconds = time.monotonic() - started
        summary = scheduler.summary() | {"bad_rows": dict(rows.bad), "seconds": round(seconds, 1)}
        summary["samples_per_second"] = round((scheduler.completed - before) / max(seconds, 1e-9), 2)
        write_json(folder / "summary.json", summary)
        lineage.record_in_run(folder / "samples", "dataset")
        return summary


def check(config: Config) -> None:
    """Raise BadConfig for unknown tasks, corrections or operations."""
    s, tasks = config.synthesis, {quota.task for quota in quotas(config.synthesis)}
    if s.method == "templates":
        if unknown := sorted(tasks - set(TASKS)):
            raise BadConfig(f"synthesis.tasks: no task {unknown[0]}", fix=f"choose from {', '.join(TASKS)}")
        check_operations(tasks, {operation.name for operation in select(config.toolbox.operations)})
    if unknown := sorted(set(s.corrections) - set(WAYS)):
        raise BadConfig(f"synthesis.corrections: no {unknown[0]}", fix=f"choose from {', '.join(WAYS)}")


def inputs(config: Config) -> Iterator[dry_run.Input]:
    s = config.synthesis
    yield from dry_run.policy_inputs(config)
    used = {quota.source for quota in quotas(s)}
    sources = {f"datasources.{name}.path": s.datasources[name].path for name in used}
    if s.method == "imitation" and s.teacher.demonstrations:
        sources["teacher.demonstrations"] = s.teacher.demonstrations
    for key, source in sorted(sources.items()):
        yield dry_run.Input(f"synthesis.{key}", source, functools.partial(dry_run.read_first, config))


def show_plan(config: Config) -> None:
    """Check every input and print the target of every task, kind and source, for `--dry-run`."""
    check(config)
    dry_run.check("synthesize", config, inputs(config))
    for quota in (cells := quotas(config.synthesis)):
        print(f"{quota.target:>8}  {quota.task:<28}{quota.kind:<18}{quota.source}", file=sys.stderr)
    print(f"{sum(quota.target for quota in cells):>8}  samples in {len(cells)} cells", file=sys.stderr)


def main() -> None:
    with job("synthesize", __doc__, show_plan) as config:
        summary = run(config)
        kinds = ", ".join(f"{kind} {count}" for kind, count in summary["kinds"].items())
        print(
            f"{summary['samples']} samples ({kinds}) in {config.run.dir}/samples, "
            f"{summary['samples_per_second']} a second"
        )
        if missing := summary["shortfall"]:
            most = ", ".join(f"{quota} {count}" for quota, count in list(missing.items())[:8])
            text = f"{sum(missing.values())} samples are missing ({most}, ...)"
            fix = "name more sources or rows, or lower target_sample_count; summary.json lists causes"
            if config.synthesis.strict:
                raise DataFailure(text, code="shortfall", fix=fix)
            print(f"warning: {text}\n  {fix}", file=sys.stderr)


if __name__ == "__main__":
    main()
