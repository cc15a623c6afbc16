"""Shared parts of the job drivers: run folder, lock, progress, clean stops."""

from __future__ import annotations

import functools
import itertools
import json
import os
import platform
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
import yaml
from ray.exceptions import RayError

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.learner import FAILURE
from pixelis.actors.node_watch import HeadWatch
from pixelis.config import Config, PolicyConfig
from pixelis.datasets.bad_rows import BAD_ROW, BadRow
from pixelis.datasets.labels import drop_labels
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.spec import ModelSpec
from pixelis.errors import BadConfig, InfraFailure, PixelisError
from pixelis.files import disk_failures
from pixelis.operations import select
from pixelis.policy import ranks
from pixelis.policy.adapters import load_adapter
from pixelis.policy.model_path import fingerprint, resolve
from pixelis.telemetry import diagnosis, events, lineage
from pixelis.telemetry.progress import Progress
from pixelis.telemetry.trackers import log_results, require_trackers

T = TypeVar("T")
POLL_S = 1.0
STOP_S, START_STOP_S = 600.0, 8.0
"""Seconds at most that a stopped run may take to save its last step, and before its first step."""
HEAD_S = 10.0
"""Seconds without the head of the Ray cluster after which a job ends."""
SOURCE_KEYS = ("data.train", "data.evaluate", "data.demonstrations", "sft.validation")
"""Configuration keys of data sources, named in errors."""
SHOWN_MESSAGES = 5
"""Most messages of a run that are printed at once; all are in events.jsonl."""
PROBE_ROWS = 1000
"""Rows of a source that are read before any actor starts."""


class Stopped(Exception):
    """The user or the cluster stopped the job. The run folder has a loadable checkpoint if a step was made."""


@contextmanager
def run_folder(config: Config, *questions: str, held_out: Sequence[str] = (), **sources: str) -> Iterator[Path]:
    """Create and lock ``run.dir``; write the configuration and the lineage to it.

    ``questions``: sources to check before any actor starts; ``held_out``: those of evaluations, of which no row may be bad.
    ``sources``: further inputs by role, recorded in the lineage. Raises BadConfig if another live process owns the folder or it
    has a run of another policy, and for an operation that does not exist; MissingFile or BadInput for an unreadable model,
    adapter, rank file or source, MissingDependency for a tracker that is not installed, and InfraFailure for a disk that refuses.
    """
    _check_policy(config)
    select(name for name in config.toolbox.operations if ":" not in name)  # a user's own may be only on the cluster
    with _folder(config, questions, held_out, sources, _policy_inputs(config)) as folder:
        yield folder


@contextmanager
def folder_without_policy(config: Config, held_out: Sequence[str]) -> Iterator[Path]:
    """``run_folder`` of an evaluation that has no policy of its own."""
    with _folder(config, (), held_out, {}, {}) as folder:
        yield folder


@contextmanager
def _folder(
    config: Config,
    questions: Sequence[str],
    held_out: Sequence[str],
    sources: Mapping[str, str],
    policy_inputs: dict[str, list[lineage.Source]],
) -> Iterator[Path]:
    require_trackers(config)
    limits: dict[str, float | None] = dict.fromkeys(questions, config.data.max_bad_rows) | dict.fromkeys(held_out)
    for source, rows in limits.items():
        # Shuffling reads a window of rows before the first question, so that errors near the beginning show at once.
        with prefix_errors(config, source):
            on_labels = None if config.rewards.labelled else drop_labels
            next(read_questions(source, seed=0, max_bad_rows=rows, shuffle_rows=PROBE_ROWS, on_labels=on_labels))
    data = {"questions": list(limits), **{role: [source] for role, source in sources.items()}}
    inputs = {**policy_inputs, **_inputs(data)}
    folder = make_run_dir(config)
    lock = folder / "lock.json"
    with disk_failures(folder):
        _acquire(lock)
    try:
        with disk_failures(folder):
            if not config.run.resume:
                for name in ("checkpoints", "versions", "train", "phases", "scorers"):
                    shutil.rmtree(folder / name, ignore_errors=True)
                for name in ("events.jsonl", "rollouts.jsonl", "consumed.jsonl", "best", lineage.NAME):
                    (folder / name).unlink(missing_ok=True)
            _check_same_run(folder / "config.yaml", config)
            (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
            stop_file(config).unlink(missing_ok=True)
            lineage.record(folder, inputs=inputs, config=config, kind="run", grows=True)
        yield folder
        log_results(config)
    finally:
        lock.unlink(missing_ok=True)


def make_run_dir(config: Config) -> Path:
    """Create ``run.dir``. Raises BadConfig if it, or a folder above it, is a file; InfraFailure for a disk that refuses."""
    folder = Path(config.run.dir)
    with disk_failures(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise BadConfig(f"run.dir={folder} is a file, or below one", fix="choose another run.dir") from None
    return folder


def _check_policy(config: Config) -> None:
    ModelSpec.load(resolve(config.policy.model))
    if config.policy.adapter and load_adapter(config.policy.adapter, lazily=True).kind == "lora" and config.policy.full:
        message = f"policy.full trains all parameters, but {config.policy.adapter} is a LoRA adapter"
        raise BadConfig(message, fix="name a checkpoint of a run with policy.full=true, or train with policy.full=false")
    if config.policy.lora.ranks:
        ranks.read(config.policy.lora.ranks)


@contextmanager
def prefix_errors(config: Config, source: str) -> Iterator[None]:
    """Prefix errors about ``source`` with its configuration key."""
    try:
        yield
    except PixelisError as error:
        keys = [key for key in SOURCE_KEYS if source == functools.reduce(getattr, key.split("."), config)]
        if keys and not error.message.startswith(keys[0]):
            error.message = f"{keys[0]}={source}: {error.message}"
        raise


def _inputs(data: dict[str, list[str]]) -> dict[str, list[lineage.Source]]:
    """Data of a run by role. Raises MissingFile for missing ones."""
    for source in itertools.chain(*data.values()):
        lineage.local_path(source)
    return {role: list(sources) for role, sources in data.items()}


def _policy_inputs(config: Config) -> dict[str, list[lineage.Source]]:
    folder = resolve(config.policy.model)
    # The embedded model is part of the package, so its name identifies it.
    embedded = lineage.Input(source="nano", sha256=fingerprint(folder)) if config.policy.model == "nano" else None
    files = {"adapter": config.policy.adapter, "ranks": config.policy.lora.ranks, "deepspeed": config.learner.deepspeed}
    inputs: dict[str, list[lineage.Source]] = {role: [Path(path)] for role, path in files.items() if path}
    return {"model": [embedded or folder], **inputs}


def _acquire(lock: Path) -> None:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("RAY_JOB_SUBMISSION_ID", "")}
    for _ in range(2):
        try:
            with open(lock, "x", encoding="utf-8") as handle:
                try:
                    json.dump(owner, handle)
                    handle.flush()
                except OSError:  # a full disk: an empty lock would stay
                    lock.unlink()
                    raise
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
    existing = yaml.safe_load(path.read_text(encoding="utf-8")).get("policy", {})
    # Keys that did not exist when the run started get today's defaults.
    before, now = (policy.model_dump(mode="json") for policy in (PolicyConfig.model_validate(existing), config.policy))
    different = sorted(key for key in now if before.get(key) != now[key])
    if different:
        raise BadConfig(
            f"{path.parent} has a run of another policy ({', '.join('policy.' + k for k in different)} differ)",
            fix="choose another run.dir, or start over with run.resume=false",
        )


def stop_file(config: Config) -> Path:
    """File that stops the learners after their current step. Users may create it too."""
    return Path(config.run.dir) / "STOP"


@contextmanager
def driver(name: str) -> Iterator[None]:
    """Context of a job's main: prints typed errors as one message with exit code 1 or 2; a stop exits with 130."""

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
    grace_s: float = START_STOP_S,
    waiting: str = "starting Ray Train",
) -> T:
    """Run ``run`` in a thread and show progress from ``poll`` (done, metrics); returns its result or raises its error.

    Before the first step the progress shows the start-up stage. Learner failures are printed immediately. Ctrl-C or SIGTERM asks
    the learner to stop after its step, calls ``stop``, waits up to ``grace_s`` seconds for the last checkpoint and raises
    Stopped. A second one, and one before the first step, ends the run soon.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    start, metrics = poll()
    done = start
    folder, started, last_message = Path(config.run.dir), time.time(), 0.0
    head = HeadWatch() if ray.is_initialized() else None
    with Progress(name, total, start=start, enabled=config.telemetry.progress) as progress:
        threading.Thread(target=call, name=name, daemon=True).start()
        try:
            while not future.done():
                time.sleep(POLL_S)
                if head is not None:
                    end_without_head(name, head)
                done, metrics = poll()
                if notice := _interruption(folder, started):
                    progress.update(done, waiting=True, status=notice)
                else:
                    progress.update(
                        done, **(metrics or ({"status": _startup_stage(folder, started, waiting)} if done == start else {}))
                    )
                last_message = _print_messages(folder, started, last_message)
            done, metrics = poll()
            progress.update(done, **metrics)
            _print_messages(folder, started, last_message)
        except KeyboardInterrupt:
            stop_file(config).touch()
            stop()
            print("stopping: the learner writes a checkpoint after this step; Ctrl-C ends at once", file=sys.stderr, flush=True)
            deadline = time.monotonic() + (grace_s if done > start else min(grace_s, START_STOP_S))
            while not future.done() and time.monotonic() < deadline:
                time.sleep(0.1)
            raise Stopped from None
    result = future.result()
    if problem := diagnosis.of_run([e for e in events.read(folder) if e["kind"].startswith("step/") and e["time"] >= started]):
        print(f"warning: {problem}", file=sys.stderr, flush=True)
    return result


def stop_s() -> float:
    """Seconds that a stopped run may take to save its last step: those that `ray job stop` leaves, less a few for the actors."""
    job_s = os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "") if os.environ.get("RAY_JOB_SUBMISSION_ID") else ""
    return max(START_STOP_S, float(job_s) - 5) if job_s.replace(".", "", 1).isdigit() else STOP_S


def end_without_head(name: str, head: HeadWatch) -> None:
    """End this process with a message if the head of the cluster has been away for HEAD_S.

    At once, because every further call of Ray, also to stop actors, would wait for the head. The next process takes over the lock
    of the run folder.
    """
    if (silent := head.silent_s()) < HEAD_S:
        return
    error = InfraFailure(
        f"the head of the Ray cluster at {head.address} has not answered for {silent:.0f} s",
        fix="start the cluster again and repeat the command; a run resumes from its last checkpoint",
    )
    print(f"pixelis {name}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _startup_stage(folder: Path, since: float, waiting: str) -> str:
    """Stage of the learner before its first step."""
    row = events.last(folder, events.STAGE)
    return row["name"] if row and row["time"] >= since - POLL_S else waiting


def _interruption(folder: Path, since: float) -> str:
    """Why the learners make no steps at the moment: the last notice since their last step; empty if they do."""
    row = events.last(folder, events.NOTICE, "step/sft", "step/policy")
    return str(row["text"]) if row is not None and row["kind"] == events.NOTICE and row["time"] >= since else ""


def _print_messages(folder: Path, since: float, last: float) -> float:
    """Print new failures of a learner, alarms of a run and unusable rows; returns the time of the last one."""
    kinds = (FAILURE, events.ALARM, BAD_ROW)
    newest = events.last(folder, *kinds)
    if newest is None or newest["time"] < since or newest["time"] <= last:
        return last
    rows = [row for row in events.read(folder) if row["kind"] in kinds and row["time"] > max(since, last)]
    for row in rows[-SHOWN_MESSAGES:]:
        if row["kind"] == BAD_ROW:
            message = f"skipped {BadRow(*(row[field] for field in BadRow._fields))}"
        elif row["kind"] == events.ALARM:
            message = f"warning: step {row['step']}: {row['text']}"
        else:
            outcome = "not retried" if row["permanent"] else "restarting from the last checkpoint"
            message = f"learner failed, {outcome}: {row['error']}: {row['message']} ({row['at']})"
        print(message, file=sys.stderr, flush=True)
    return float(newest["time"])


def require_checkpoint(latest: Path | None) -> Path:
    """Return the run's last checkpoint. Raises InfraFailure if the run made no step."""
    if latest is None:
        raise InfraFailure("the run made no step and wrote no checkpoint", fix="see events.jsonl in run.dir")
    return latest


def latest_step(folder: Path, kind: str, keys: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
    """Step and selected metrics of the last ``kind`` event in ``folder``; (0, {}) before the first."""
    row = events.last(folder, kind)
    if row is None:
        return 0, {}
    metrics = {key.rsplit("/", 1)[-1]: row[key] for key in keys if isinstance(row.get(key), int | float)}
    return int(row["step"]), metrics


def hardware() -> str:
    """Description of the machine for published figures."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return f"{os.cpu_count()} CPU cores ({cpu}), {platform.system()}, Python {platform.python_version()}"
