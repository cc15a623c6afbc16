"""Chain-of-Thought-Action samples from annotated media: right ones, traps and self-corrections, over Ray Data.

Result: JSON lines in run.dir/samples (read them as data.demonstrations=RUN_DIR/samples) and run.dir/summary.json with counts,
causes of drops and what is missing. Re-running with the same run.dir goes on where a run was stopped or killed.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from pixelis.actors import cluster, synthesis
from pixelis.config import Config, from_command_line
from pixelis.datasets.synthesis.corrections import WAYS
from pixelis.datasets.synthesis.quota_scheduler import Ledger, Rows, cells
from pixelis.datasets.synthesis.tasks import TASKS
from pixelis.errors import BadConfig, DataFailure
from pixelis.jobs.driver import driver, run_folder
from pixelis.telemetry import lineage
from pixelis.telemetry.progress import Progress


def run(config: Config) -> dict[str, Any]:
    """Make the samples that are still missing; returns the summary. DataFailure for a shortfall with ``synthesis.strict``."""
    check(config)
    synthesis.maker(config).close()  # what is missing is said before a cluster is started
    used = sorted({config.synthesis.datasources[cell.source].path for cell in cells(config.synthesis)})
    with run_folder(config, *used) as folder:
        if not config.run.resume:
            _start_over(folder)
        ledger, rows = Ledger(folder, config.synthesis, config.run.seed), Rows(config.synthesis, config.data.max_bad_rows)
        before, started = ledger.made, time.monotonic()
        with Progress("synthesize", ledger.target, start=before, enabled=config.telemetry.progress) as progress:
            progress.update(before, status="reading sources")
            while ledger.made < ledger.target and (ledger.left() or ledger.plan(rows)):
                cluster.connect(config)
                made = synthesis.outcomes(config, ledger.left(), rows)
                while ledger.made < ledger.target and (shard := list(itertools.islice(made, config.synthesis.shard))):
                    ledger.commit(shard)
                    progress.update(ledger.made, attempts=sum(cell.tried for cell in ledger.cells.values()))
        seconds = time.monotonic() - started
        summary = ledger.summary() | {"bad_rows": dict(rows.bad), "seconds": round(seconds, 1)}
        summary["samples_per_second"] = round((ledger.made - before) / max(seconds, 1e-9), 2)
        (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
        lineage.record_of_run(folder / "samples", "dataset")
        return summary


def _start_over(folder: Path) -> None:
    for name in ("rounds", "shards", "samples"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "summary.json").unlink(missing_ok=True)


def check(config: Config) -> None:
    """BadConfig for tasks, ways of correcting or operations that do not exist."""
    s = config.synthesis
    planned = cells(s)
    if s.method == "templates" and (unknown := sorted({cell.task for cell in planned} - set(TASKS))):
        raise BadConfig(f"synthesis.tasks: no task {', '.join(unknown)}", fix=f"choose from {', '.join(TASKS)}")
    if unknown := sorted(set(s.corrections) - set(WAYS)):
        raise BadConfig(f"synthesis.corrections: no {', '.join(unknown)}", fix=f"choose from {', '.join(WAYS)}")


def show_plan(config: Config) -> None:
    """What ``--dry-run`` adds: the target of every task, kind and source, on standard error."""
    check(config)
    for cell in (planned := cells(config.synthesis)):
        print(f"{cell.target:>8}  {cell.task:<28}{cell.kind:<18}{cell.source}", file=sys.stderr)
    print(f"{sum(cell.target for cell in planned):>8}  samples in {len(planned)} cells", file=sys.stderr)


def main() -> None:
    """Entry point of `python -m pixelis.jobs.synthesize`."""
    config = from_command_line(__doc__, "synthesize", default="configs/nano/synthesize.yaml", check=show_plan)
    with driver("synthesize"):
        summary = run(config)
        kinds = ", ".join(f"{kind} {count}" for kind, count in summary["kinds"].items())
        print(f"{summary['samples']} samples ({kinds}) in {config.run.dir}/samples, {summary['samples_per_second']} a second")
        if missing := summary["shortfall"]:
            told = ", ".join(f"{cell} {count}" for cell, count in list(missing.items())[:8])
            text = f"{sum(missing.values())} samples are missing ({told}{', ...' if len(missing) > 8 else ''})"
            fix = "name more sources or rows, or lower target_sample_count; summary.json says why attempts gave nothing"
            if config.synthesis.strict:
                raise DataFailure(text, code="shortfall", fix=fix)
            print(f"warning: {text}\n  {fix}", file=sys.stderr)


if __name__ == "__main__":
    main()
