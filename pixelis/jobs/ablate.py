"""Train and evaluate the arms of an ablation file with several seeds, and test their differences.

usage: pixelis ablate FILE [key=value ...] [--dry-run]

`key=value` replaces a key of the file (seeds, dir, parallel, recipe, ...) or is an override of every arm, such as
policy.adapter=CHECKPOINT. --dry-run checks the inputs of every arm, and prints the trials and what differs between
each arm and the reference. Writes report.json and report.html to the `dir` of the file. Running again repeats what
has failed, continues what was interrupted, and adds what is new.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import ray

from pixelis.actors import cluster, placement
from pixelis.config import Config, load
from pixelis.config.ablation import EVALUATION, AblationConfig, Trial, differences, read, trials
from pixelis.errors import BadConfig, InfraFailure, PixelisError
from pixelis.evaluation.ablation import question_scores
from pixelis.files import write_json
from pixelis.jobs import ablation_report
from pixelis.jobs.command import asks_for_help, file_and_overrides
from pixelis.jobs.driver import Stopped, driver
from pixelis.records import Group
from pixelis.telemetry.progress import clock

RESULT, SAVED, STAGE, LOG = "result.json", "trial.yaml", "stage.json", "trial.log"
POLL_S = 0.2
STOP_S = 60.0
"""Seconds that the processes of trials have to write a checkpoint when the ablation is stopped."""


def start(stage: str, trial: Trial, address: str) -> subprocess.Popen[bytes]:
    """Start a trial on the cluster at ``address``; its output is trial.log in its folder."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    write_json(trial.folder / STAGE, {"stage": stage})
    (trial.folder / SAVED).write_text(trial.config.to_yaml(), encoding="utf-8")
    with (trial.folder / LOG).open("ab") as output:
        # In a session of its own: Ctrl-C in the terminal reaches it through this process alone, once.
        return subprocess.Popen(
            [sys.executable, "-m", "pixelis.jobs.ablation_trial", stage, str(trial.folder / SAVED)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "RAY_ADDRESS": address},
        )


def finish(ablation: AblationConfig, trial: Trial, code: int, seconds: float) -> None:
    """Write the scores of a trial that has ended. Raises InfraFailure with its error."""
    if code:
        log = trial.folder / LOG
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        reason = next(
            (line for line in reversed(lines) if line.startswith(f"pixelis {ablation.stage}: ")), lines[-1]
        )
        raise InfraFailure(
            f"{reason} (exit code {code})", fix=f"see {log}; run the ablation again to repeat this trial"
        )
    scores = question_scores(read_groups(trial.folder / EVALUATION))
    result = {"arm": trial.arm, "seed": trial.seed, "seconds": round(seconds, 1), "scores": scores}
    write_json(trial.folder / RESULT, result)


def read_groups(folder: Path) -> dict[str, Group]:
    groups = {}
    for path in sorted(folder.glob("trajectories-*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for group in map(Group.model_validate_json, lines):
                groups[f"{path.stem.removeprefix('trajectories-')}/{group.question.id}"] = group
    return groups


def result_of(ablation: AblationConfig, trial: Trial) -> dict[str, Any] | None:
    """The result of a finished trial, else None. BadConfig if its folder has a trial of another configuration."""
    saved, fix = trial.folder / SAVED, f"choose another `dir`, or remove {trial.folder}"
    try:
        changed = list(differences(load(saved), trial.config)) if saved.is_file() else []
    except BadConfig as error:
        raise BadConfig(f"{saved} was written by another version: {error.message}", fix=fix) from None
    stage = trial.folder / STAGE
    if stage.is_file() and json.loads(stage.read_text(encoding="utf-8"))["stage"] != ablation.stage:
        changed = ["stage", *changed]
    if changed:
        raise BadConfig(
            f"{trial.folder} has a trial of another configuration ({', '.join(changed)} changed)", fix=fix
        )
    path = trial.folder / RESULT
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


@contextmanager
def trial_cluster(ablation: AblationConfig, config: Config) -> Iterator[str]:
    """The address of the cluster that the trials share: the joined one, else a local one for ``parallel`` trials."""
    if joined := config.cluster.address or os.environ.get("RAY_ADDRESS"):
        yield joined
        return
    cpus = ablation.parallel * cluster.local_cpus(config)
    needed, largest = placement.object_store_bytes(config)
    cluster.connect(config.changed({"cluster.cpus": cpus}), ablation.parallel * needed, largest)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def run(ablation: AblationConfig) -> dict[str, Any]:
    """Run what has no result yet, then write and return the report. Raises InfraFailure if trials failed."""
    every = trials(ablation)
    remaining = [trial for trial in every if result_of(ablation, trial) is None]
    total, failures = len(every), dict[str, str]()
    print(f"{total - len(remaining)} of {total} trials are finished; results go to {ablation.dir}/")
    if remaining:
        with trial_cluster(ablation, remaining[0].config) as address:
            print(f"running {len(remaining)} trials, {ablation.parallel} at once", flush=True)
            failures = run_trials(ablation, remaining, address)
    results = [result for trial in every if (result := result_of(ablation, trial)) is not None]
    report = ablation_report.write(ablation, results, failures)
    if failures:
        names = "\n".join(f"  {name}: {reason}" for name, reason in failures.items())
        raise InfraFailure(
            f"{len(failures)} of {total} trials failed:\n{names}", fix="run the ablation again to repeat them"
        )
    return report


def run_trials(ablation: AblationConfig, remaining: Sequence[Trial], address: str) -> dict[str, str]:
    """Run trials, ``parallel`` at once; returns the messages of failed ones by name. Raises Stopped."""
    waiting, running = deque(remaining), list[tuple[Trial, subprocess.Popen[bytes], float]]()
    failures, done = dict[str, str](), 0
    try:
        while waiting or running:
            while waiting and len(running) < ablation.parallel:
                trial = waiting.popleft()
                running.append((trial, start(ablation.stage, trial, address), time.monotonic()))
            ended = [entry for entry in running if entry[1].poll() is not None]
            for trial, process, began in ended:
                name, seconds, done = f"{trial.arm}, seed {trial.seed}", time.monotonic() - began, done + 1
                try:
                    finish(ablation, trial, process.returncode, seconds)
                    outcome = f"took {clock(seconds)}"
                except (PixelisError, OSError) as error:
                    failures[name] = error.message if isinstance(error, PixelisError) else str(error)
                    outcome = f"failed: {error}"
                print(f"[ablate] {done}/{len(remaining)}  {name}  {outcome}", flush=True)
            running = [entry for entry in running if entry not in ended]
            time.sleep(0 if ended else POLL_S)
    except KeyboardInterrupt:
        print("stopping: the trials write checkpoints after their step", file=sys.stderr, flush=True)
        raise Stopped from None
    finally:
        for _, process, _ in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for _, process, _ in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
    return failures


def show_plan(ablation: AblationConfig) -> None:
    """Print trials, differences and folders; check the inputs of each arm, whose name is in the errors."""
    every = trials(ablation)
    configs = {trial.arm: trial.config for trial in every if trial.seed == ablation.seeds[0]}
    seeds = ", ".join(map(str, ablation.seeds))
    trials_of = f"{len(configs)} arms x seeds {seeds}; stage {ablation.stage} of {ablation.recipe}"
    print(f"{len(every)} trials: {trials_of}")
    for arm, config in configs.items():
        changes = differences(configs[ablation.reference], config)
        print(f"\n{arm}{' (reference)' if arm == ablation.reference else ''}")
        for key, (before, after) in changes.items():
            print(f"    {key}: {json.dumps(before, default=str)} -> {json.dumps(after, default=str)}")
    finished = sum(result_of(ablation, trial) is not None for trial in every)
    print(f"\nresults: {Path(ablation.dir).absolute()}; {finished} trials are finished\n")
    for arm, config in configs.items():
        output = io.StringIO()
        try:
            with redirect_stderr(output):
                for job in {ablation.stage, "evaluate"}:
                    importlib.import_module(f"pixelis.jobs.{job}").check(config)
        except PixelisError as error:
            print(output.getvalue(), file=sys.stderr)
            error.message = f"arm {arm}: {error.message}"
            raise
        print(f"ok     {arm}: inputs and configuration", flush=True)


def main() -> None:
    if asks_for_help(sys.argv[1:]):
        print((__doc__ or "").strip())
        return
    with driver("ablate"):
        path, overrides, is_dry = file_and_overrides(
            "ablate", fix="pixelis ablate FILE; see configs/ablations"
        )
        ablation = read(path, overrides)
        if is_dry:
            show_plan(ablation)
        else:
            run(ablation)


if __name__ == "__main__":
    main()
