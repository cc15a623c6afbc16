"""Watches the work of a job from its driver: progress, messages, a clean stop, a lost head of the cluster."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle

from pixelis.actors.node_watch import HeadWatch
from pixelis.config import Config
from pixelis.datasets import bad_rows
from pixelis.errors import InfraFailure
from pixelis.jobs.driver import Stopped, stop_file
from pixelis.telemetry import diagnosis, events
from pixelis.telemetry.progress import Progress

T = TypeVar("T")
POLL_S = 1.0
STOP_S, START_STOP_S = 600.0, 8.0
"""Seconds at most that a stopped run may take to save its last step, and before its first step."""
HEAD_S = 10.0
"""Seconds without the head of the Ray cluster after which a job ends."""


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
    """The result of ``run``, called in a thread; shows progress from ``poll`` (done, metrics).

    Ctrl-C or SIGTERM asks the learner to stop after its step, calls ``stop``, waits up to ``grace_s`` seconds
    for the last checkpoint and raises Stopped. A second one, or one before the first step, ends the run soon.
    """
    start, _ = poll()
    done, started = start, time.time()
    messages = Messages(Path(config.run.dir))
    head = HeadWatch() if ray.is_initialized() else None
    with Progress(name, total, start=start, enabled=config.telemetry.progress) as progress:
        future = call_in_thread(run, name)
        try:
            while not future.done():
                time.sleep(POLL_S)
                if head is not None:
                    end_without_head(name, head)
                done, metrics = poll()
                messages.show()
                if messages.interruption:
                    progress.update(done, waiting=True, status=messages.interruption)
                elif not metrics and done == start:
                    progress.update(done, status=messages.stage or waiting)
                else:
                    progress.update(done, **metrics)
            done, metrics = poll()
            progress.update(done, **metrics)
            messages.show()
        except KeyboardInterrupt:
            stop_file(config).touch()
            stop()
            say("stopping: the learner writes a checkpoint after this step; Ctrl-C ends at once")
            deadline = time.monotonic() + (grace_s if done > start else min(grace_s, START_STOP_S))
            while not future.done() and time.monotonic() < deadline:
                time.sleep(0.1)
            raise Stopped from None
    result = future.result()
    new = [event for event in events.read(config.run.dir) if event["time"] >= started]
    if problem := diagnosis.of_run([event for event in new if event["kind"].startswith("step/")]):
        say(f"warning: {problem}")
    return result


def watch_evaluation(
    config: Config, coordinator: ActorHandle, name: str, total: int, *request: Any, **options: Any
) -> Any:
    return watch(
        config,
        f"evaluate {name}",
        total,
        lambda: ray.get(coordinator.evaluate.remote(*request, name=name, **options)),
        lambda: (ray.get(coordinator.progress.remote())["evaluated"].get(name, 0), {}),
        waiting="answering the first questions",
    )


def call_in_thread(call: Callable[[], T], name: str | None = None) -> Future[T]:
    """The result of a call in a thread that a stopped job does not wait for, unlike those of an executor."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


class Messages:
    def __init__(self, folder: Path):
        self.log = events.Tail(folder)
        self.stage = ""
        """The learner's stage before its first step."""
        self.interruption = ""

    def show(self) -> None:
        for row in self.log.read():
            match row["kind"]:
                case events.STAGE:
                    self.stage = row["name"]
                case events.NOTICE:
                    self.interruption = row["text"]
                case "step/sft" | "step/policy":
                    self.interruption = ""
                case events.ALARM:
                    say(f"warning: step {row['step']}: {row['text']}")
                case events.LEARNER_FAILURE:
                    outcome = "not retried" if row["permanent"] else "restarting from the last checkpoint"
                    say(f"learner failed, {outcome}: {row['error']}: {row['message']} ({row['at']})")
                case bad_rows.BAD_ROW:
                    say(f"skipped {bad_rows.BadRow(*(row[field] for field in bad_rows.BadRow._fields))}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def stop_s() -> float:
    """Seconds that a stopped run may take to save its last step: what `ray job stop` leaves, less 5 for actors."""
    job_s = os.environ.get("RAY_JOB_STOP_WAIT_TIME_S") if os.environ.get("RAY_JOB_SUBMISSION_ID") else None
    return max(START_STOP_S, float(job_s) - 5) if job_s else STOP_S


def end_without_head(name: str, head: HeadWatch) -> None:
    """End this process if the head of the cluster has been away for HEAD_S: every call of Ray would wait for it."""
    if (silent := head.silent_s()) < HEAD_S:
        return
    error = InfraFailure(
        f"the head of the Ray cluster at {head.address} has not answered for {silent:.0f} s",
        fix="start the cluster again and repeat the command; a run resumes from its last checkpoint",
    )
    say(f"pixelis {name}: {error}")
    os._exit(1)


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
