"""Train and evaluate the arms of an ablation file with several seeds, and test which differences are more than chance.

usage: pixelis ablate FILE [key=value ...] [--dry-run]

`key=value` replaces a key of the file (seeds, dir, parallel, recipe, ...) or is an override of every arm, such as
policy.adapter=runs/nano/sft/checkpoints/step_00000150. --dry-run checks the inputs of every arm, and prints the trials and what
differs between each arm and the reference. Writes report.json and report.html to the `dir` of the file. The other trials go on
when one fails. Running again repeats what has failed, continues what was interrupted, and adds what is new; finished trials stay.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import ray

from pixelis.actors import cluster, placement
from pixelis.actors.reservations import node_resources
from pixelis.config import Config, load
from pixelis.config.ablation import EVALUATION, AblationConfig, Trial, differences, read, trials
from pixelis.errors import BadConfig, InfraFailure, PixelisError
from pixelis.evaluation.ablation import question_scores
from pixelis.files import write_json
from pixelis.jobs import ablation_report, plan
from pixelis.jobs.command import CommandParser, asks_for_help
from pixelis.jobs.driver import Stopped, driver
from pixelis.records import Group
from pixelis.telemetry.progress import clock

RESULT, SAVED, STAGE = "result.json", "trial.yaml", "stage.json"
STOP_S = 60.0
"""Seconds that the processes of trials have to write a checkpoint when the ablation is stopped."""


class Processes:
    """Runs trials as processes of their own on one cluster, several at once, and stops them together."""

    def __init__(self, address: str) -> None:
        self._environment = {**os.environ, "RAY_ADDRESS": address}
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, stage: str, config: Config) -> None:
        """Run a trial to its end; configuration and output are trial.yaml and trial.log in its folder.

        Raises InfraFailure with the trial's error.
        """
        folder = Path(config.run.dir)
        path, log = folder / SAVED, folder / "trial.log"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(config.to_yaml(), encoding="utf-8")
        with log.open("ab") as output:
            with self._lock:
                if self._stopped:
                    raise Stopped
                command = [sys.executable, "-m", "pixelis.jobs.ablation_trial", stage, str(path)]
                # In a session of its own: Ctrl-C in the terminal reaches it through `stop` alone, once.
                process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=self._environment
                )
                self._running.add(process)
            code = process.wait()
            with self._lock:
                self._running.remove(process)
        if code:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
            reason = next((line for line in reversed(lines) if line.startswith(f"pixelis {stage}: ")), lines[-1])
            raise InfraFailure(f"{reason} (exit code {code})", fix=f"see {log}; run the ablation again to repeat this trial")

    def stop(self) -> None:
        """Ask all processes to stop after their step, and wait for their checkpoints."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def run_trial(processes: Processes, ablation: AblationConfig, trial: Trial) -> float:
    """Train and evaluate; keeps the scores of every question in the trial's result. Returns the seconds."""
    start = time.monotonic()
    trial.folder.mkdir(parents=True, exist_ok=True)
    write_json(trial.folder / STAGE, {"stage": ablation.stage})
    processes.run(ablation.stage, trial.config)
    seconds = time.monotonic() - start
    scores = question_scores(read_groups(trial.folder / EVALUATION))
    result = {"arm": trial.arm, "seed": trial.seed, "seconds": round(seconds, 1), "scores": scores}
    write_json(trial.folder / RESULT, result)
    return seconds


def read_groups(folder: Path) -> dict[str, Group]:
    """The groups of an evaluation by set and question."""
    groups = {}
    for path in sorted(folder.glob("trajectories-*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for group in map(Group.model_validate_json, lines):
                groups[f"{path.stem.removeprefix('trajectories-')}/{group.question.id}"] = group
    return groups


def result_of(ablation: AblationConfig, trial: Trial) -> dict[str, Any] | None:
    """The result of a finished trial, else None.

    Raises BadConfig if its folder has a trial of another stage or configuration.
    """
    saved, fix = trial.folder / SAVED, f"choose another `dir`, or remove {trial.folder}"
    try:
        changed = list(differences(load(saved), trial.config)) if saved.is_file() else []
    except BadConfig as error:
        raise BadConfig(f"{saved} was written by another version: {error.message}", fix=fix) from None
    stage = trial.folder / STAGE
    if stage.is_file() and json.loads(stage.read_text(encoding="utf-8"))["stage"] != ablation.stage:
        changed = ["stage", *changed]
    if changed:
        raise BadConfig(f"{trial.folder} has a trial of another configuration ({', '.join(changed)} changed)", fix=fix)
    path = trial.folder / RESULT
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


@contextmanager
def trial_cluster(ablation: AblationConfig, config: Config) -> Iterator[tuple[str, int]]:
    """The address of the cluster that the trials share, and the number of trials to run at once.

    The joined cluster, where `parallel` is by default as many trials as have room; else a local one, where it is one.
    """
    address, most = config.cluster.address or os.environ.get("RAY_ADDRESS"), len(ablation.arms) * len(ablation.seeds)
    if address:
        cluster.connect(config)
        nodes = [plan.Node(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in node_resources().values()]
        workers = ablation.parallel or max(1, plan.copies(_job(ablation.stage).needs(config), nodes, most))
        ray.shutdown()  # the trials are drivers of their own, and outlive a lost connection of this process
    else:
        workers = ablation.parallel or 1
        cpus = workers * cluster.local_cpus(config)
        shared = config.model_copy(update={"cluster": config.cluster.model_copy(update={"cpus": cpus})})
        needed, largest = placement.object_store_bytes(config)
        cluster.connect(shared, workers * needed, largest)
        address = ray.get_runtime_context().gcs_address
    try:
        yield address, workers
    finally:
        ray.shutdown()


def run(ablation: AblationConfig) -> dict[str, Any]:
    """Run what has no result yet, then write the report and return its content.

    Raises InfraFailure after the report if trials failed, Stopped when interrupted.
    """
    every = trials(ablation)
    remaining = [trial for trial in every if result_of(ablation, trial) is None]
    total, failures = len(every), dict[str, str]()
    print(f"{total - len(remaining)} of {total} trials are finished; results go to {ablation.dir}/")
    if remaining:
        with trial_cluster(ablation, remaining[0].config) as (address, workers):
            print(f"running {len(remaining)} trials, {workers} at once; Ctrl-C stops, running again resumes", flush=True)
            failures = run_trials(Processes(address), ablation, remaining, workers, total)
    results = [result for trial in every if (result := result_of(ablation, trial)) is not None]
    report = ablation_report.write(ablation, results, failures)
    if failures:
        names = "\n".join(f"  {name}: {reason}" for name, reason in failures.items())
        raise InfraFailure(f"{len(failures)} of {total} trials failed:\n{names}", fix="run the ablation again to repeat them")
    return report


def run_trials(
    processes: Processes, ablation: AblationConfig, remaining: Sequence[Trial], workers: int, total: int
) -> dict[str, str]:
    """Run trials, ``workers`` at once; returns the messages of failed ones by name."""
    failures, done = dict[str, str](), total - len(remaining)
    pool = ThreadPoolExecutor(workers)
    futures = {pool.submit(run_trial, processes, ablation, trial): f"{trial.arm}, seed {trial.seed}" for trial in remaining}
    try:
        for future in as_completed(futures):
            name, done = futures[future], done + 1
            try:
                outcome = f"took {clock(future.result())}"
            except (PixelisError, OSError) as error:
                failures[name] = error.message if isinstance(error, PixelisError) else str(error)
                outcome = f"failed: {error}"
            print(f"[ablate] {done}/{total}  {name}  {outcome}", flush=True)
    except KeyboardInterrupt:
        print("stopping: the trials write checkpoints after their step", file=sys.stderr, flush=True)
        raise Stopped from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        processes.stop()
        pool.shutdown()
    return failures


def show_plan(ablation: AblationConfig) -> None:
    """Print trials, differences and folders; check the inputs of each arm, whose name is in the errors."""
    every = trials(ablation)
    configs = {trial.arm: trial.config for trial in every if trial.seed == ablation.seeds[0]}
    seeds = ", ".join(map(str, ablation.seeds))
    print(f"{len(every)} trials: {len(configs)} arms x seeds {seeds}; stage {ablation.stage} of {ablation.recipe}")
    for arm, config in configs.items():
        changes = differences(configs[ablation.reference], config)
        print(f"\n{arm}" + (" (reference)" if arm == ablation.reference else "" if changes else " (the same as the reference)"))
        for key, (before, after) in changes.items():
            print(f"    {key}: {json.dumps(before, default=str)} -> {json.dumps(after, default=str)}")
    config = configs[ablation.reference]
    held_out = ", ".join(source if not name else f"{name} {source}" for name, source in config.held_out.items())
    print(
        f"\neach is evaluated on up to {config.evaluate.questions} questions of {held_out}, {config.evaluate.samples} episode(s) "
        f"each; compared: {ablation.metric}"
    )
    finished = sum(result_of(ablation, trial) is not None for trial in every)
    print(f"results: {Path(ablation.dir).absolute()}/ARM/seed_SEED, report.json, report.html; {finished} trials are finished\n")
    for arm, config in configs.items():
        jobs = dict.fromkeys((ablation.stage, "evaluate"))
        output = io.StringIO()
        try:
            with redirect_stderr(output):
                for job in jobs:
                    _job(job).check(config)
        except PixelisError as error:
            print(output.getvalue(), file=sys.stderr)
            error.message = f"arm {arm}: {error.message}"
            raise
        print(f"ok     {arm}: inputs and configuration", flush=True)


def _job(name: str) -> Any:
    return importlib.import_module(f"pixelis.jobs.{name}")


def main() -> None:
    """Entry point of `pixelis ablate`."""
    words = sys.argv[1:]
    if asks_for_help(words):
        print((__doc__ or "").strip())
        return
    with driver("ablate"):
        parser = CommandParser("ablate")
        parser.add_argument("words", nargs="*")
        parser.add_argument("--dry-run", action="store_true")
        options = parser.parse_intermixed_args(words)
        files = [word for word in options.words if "=" not in word]
        if len(files) != 1:
            raise BadConfig(f"{len(files)} ablation files", fix="pixelis ablate FILE [key=value ...]; see configs/ablations")
        ablation = read(files[0], [word for word in options.words if "=" in word])
        if options.dry_run:
            show_plan(ablation)
            return
        run(ablation)


if __name__ == "__main__":
    main()
