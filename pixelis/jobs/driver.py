"""Shared parts of the job drivers: the run folder and its lock, clean stops, progress."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from ray.exceptions import RayError

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.learner import FAILURE
from pixelis.config import Config, PolicyConfig
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.spec import ModelSpec
from pixelis.errors import BadConfig, InfraFailure, PixelisError
from pixelis.policy import ranks
from pixelis.policy.adapters import load_header
from pixelis.policy.model_path import fingerprint, resolve
from pixelis.telemetry import artifacts, events, lineage
from pixelis.telemetry.metrics import require_trackers
from pixelis.telemetry.progress import Progress

T = TypeVar("T")
POLL_S = 1.0
SOURCES = ("data.train", "data.evaluate", "data.demonstrations", "sft.validation")
"""Keys of what jobs read, to name in errors."""
PROBED = 1000
"""Rows of a source that are read before any actor is started."""


class Stopped(Exception):
    """The user or the cluster asked the job to end; the run folder holds a loadable checkpoint if a step was made."""


@contextmanager
def run_folder(config: Config, *questions: str, **sources: str) -> Iterator[Path]:
    """Own ``run.dir``: made, locked against a second run, its configuration and its lineage written beside the results.

    ``sources``: what else the run is made from, by role; not read here, but named in the lineage.
    Raises BadConfig when another live process owns it, or when it holds a run of another policy; MissingFile or BadInput, before
    any actor is started, for a model, an adapter, a rank file or one of the sources of ``questions`` that cannot be read;
    MissingDependency for a tracker that is not installed.
    """
    ModelSpec.load(resolve(config.policy.model))
    require_trackers(config)
    if config.policy.adapter and load_header(config.policy.adapter)[1]["kind"] == "lora" and config.policy.full:
        message = f"policy.full trains all parameters, but {config.policy.adapter} holds an adapter"
        raise BadConfig(message, fix="name a checkpoint of a run with policy.full=true, or train with policy.full=false")
    if config.policy.lora.ranks:
        ranks.read(config.policy.lora.ranks)
    for source in questions:
        # A shuffled window is read before its first question comes: what is wrong near the beginning shows at once.
        with naming(config, source):
            next(read_questions(source, seed=0, max_bad_rows=config.data.max_bad_rows, shuffle_rows=PROBED))
    inputs = _inputs(config, {"questions": list(questions), **{role: [source] for role, source in sources.items()}})
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "lock.json"
    _claim(lock)
    try:
        if not config.run.resume:
            for name in ("checkpoints", "versions", "train", "phases", "scorers"):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in ("events.jsonl", "rollouts.jsonl", "consumed.jsonl", lineage.NAME):
                (folder / name).unlink(missing_ok=True)
        _check_same_run(folder / "config.yaml", config)
        (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        stop_file(config).unlink(missing_ok=True)
        lineage.record(folder, inputs=inputs, config=config, kind="run", grows=True)
        yield folder
        artifacts.log_results(config)
    finally:
        lock.unlink(missing_ok=True)


@contextmanager
def naming(config: Config, source: str) -> Iterator[None]:
    """Name the configuration key that holds ``source`` in an error about it."""
    try:
        yield
    except PixelisError as error:
        keys = [key for key in SOURCES if source == functools.reduce(getattr, key.split("."), config)]
        if keys and not error.message.startswith(keys[0]):
            error.message = f"{keys[0]}={source}: {error.message}"
        raise


def _inputs(config: Config, data: dict[str, list[str]]) -> dict[str, list[lineage.Source]]:
    """What a run is made from, by role. Raises MissingFile for what is not there."""
    folder = resolve(config.policy.model)
    # The embedded model comes with the package: its name says where it is.
    embedded = lineage.Input(source="nano", sha256=fingerprint(folder)) if config.policy.model == "nano" else None
    files = {"adapter": config.policy.adapter, "ranks": config.policy.lora.ranks, "deepspeed": config.learner.deepspeed}
    named: dict[str, list[lineage.Source]] = {role: [Path(path)] for role, path in files.items() if path}
    for source in itertools.chain(*data.values()):
        lineage.local_path(source)
    return {"model": [embedded or folder], **named, **{role: list(found) for role, found in data.items()}}


def _claim(lock: Path) -> None:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("RAY_JOB_SUBMISSION_ID", "")}
    for _ in range(2):
        try:
            with open(lock, "x", encoding="utf-8") as handle:
                json.dump(owner, handle)
            return
        except FileExistsError:
            try:
                other = json.loads(lock.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                other = {}
            if other.get("host") == owner["host"] and not _alive(int(other.get("pid", 0))):
                lock.unlink(missing_ok=True)
                continue
            raise BadConfig(
                f"{lock.parent} is in use by process {other.get('pid')} on {other.get('host')} {other.get('job', '')}".rstrip(),
                fix=f"wait for it, choose another run.dir, or remove {lock} if that process is gone",
            ) from None
    raise BadConfig(f"{lock} cannot be claimed", fix="remove it and try again")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0


def _check_same_run(path: Path, config: Config) -> None:
    if not path.is_file() or not (path.parent / "checkpoints").is_dir():
        return
    kept = yaml.safe_load(path.read_text(encoding="utf-8")).get("policy", {})
    # With today's defaults for keys that were not there when the run began.
    before, now = (policy.model_dump(mode="json") for policy in (PolicyConfig.model_validate(kept), config.policy))
    different = sorted(key for key in now if before.get(key) != now[key])
    if different:
        raise BadConfig(
            f"{path.parent} holds a run with another policy ({', '.join('policy.' + k for k in different)} differ)",
            fix="choose another run.dir, or start over with run.resume=false",
        )


def stop_file(config: Config) -> Path:
    """Learners end after the step during which this file appears; a user may create it too."""
    return Path(config.run.dir) / "STOP"


@contextmanager
def driver(name: str) -> Iterator[None]:
    """The frame of a job's main: typed errors become one clear message and exit code 1, a stop becomes 130."""

    def on_term(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_term)
    try:
        yield
    except (PixelisError, RayError) as error:
        cause = unwrap_ray_error(error)
        if cause is None:
            raise
        print(f"pixelis {name}: {cause}", file=sys.stderr)
        raise SystemExit(2 if cause.code == "bad_config" else 1) from None
    except (KeyboardInterrupt, Stopped):
        print(f"pixelis {name}: stopped", file=sys.stderr)
        raise SystemExit(130) from None


def watch(
    config: Config,
    name: str,
    total: int,
    run: Callable[[], T],
    poll: Callable[[], tuple[int, dict[str, Any]]],
    stop: Callable[[], Any] = lambda: None,
    grace_s: float = 8.0,
    waiting: str = "starting Ray Train",
) -> T:
    """Run ``run`` in a thread while progress from ``poll`` (done, metrics) is shown; returns its result or raises its error.

    Before the first step the progress names the stage of the start; failures of learners are printed as they happen.

    Ctrl-C or SIGTERM asks the learner to stop after its step, calls ``stop`` to end what it may be waiting for, gives it
    ``grace_s`` seconds for the last checkpoint and raises Stopped.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    start, metrics = poll()
    folder, began, failures = Path(config.run.dir), time.time(), 0.0
    with Progress(name, total, start=start, enabled=config.telemetry.progress) as progress:
        threading.Thread(target=call, name=name, daemon=True).start()
        try:
            while not future.done():
                time.sleep(POLL_S)
                done, metrics = poll()
                progress.update(done, **(metrics or ({"status": _starting(folder, began, waiting)} if done == start else {})))
                failures = _show_failure(folder, began, failures)
            done, metrics = poll()
            progress.update(done, **metrics)
        except KeyboardInterrupt:
            stop_file(config).touch()
            stop()
            print("stopping: the learner writes a checkpoint after this step", file=sys.stderr, flush=True)
            deadline = time.monotonic() + grace_s
            while not future.done() and time.monotonic() < deadline:
                time.sleep(0.1)
            raise Stopped from None
        return future.result()


def _starting(folder: Path, since: float, waiting: str) -> str:
    """What the learner is doing before its first step."""
    row = events.last(folder, events.STAGE)
    return row["name"] if row and row["time"] >= since - POLL_S else waiting


def _show_failure(folder: Path, since: float, shown: float) -> float:
    """Print a failure of a learner as soon as it is there; returns the time of the last one shown."""
    row = events.last(folder, FAILURE)
    if row is None or row["time"] < since or row["time"] <= shown:
        return shown
    outcome = "not retried" if row["permanent"] else "starting again from the last checkpoint"
    print(f"learner failed, {outcome}: {row['error']}: {row['message']} ({row['at']})", file=sys.stderr, flush=True)
    return float(row["time"])


def require_checkpoint(latest: Path | None) -> Path:
    """The run's last checkpoint; InfraFailure for a run that made no step, so that it cannot pass for a good one."""
    if latest is None:
        raise InfraFailure("the run made no step and left no checkpoint", fix="look at events.jsonl in run.dir")
    return latest


def latest_step(folder: Path, kind: str, keys: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
    """Steps done and the chosen metrics of the newest ``kind`` event in ``folder``; (0, {}) before the first."""
    row = events.last(folder, kind)
    if row is None:
        return 0, {}
    shown = {key.rsplit("/", 1)[-1]: row[key] for key in keys if isinstance(row.get(key), int | float)}
    return int(row["step"]), shown
