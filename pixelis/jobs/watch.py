"""Watches the work of a job from its driver: progress, messages of the learners, a clean stop, a lost head of
the cluster.
"""

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

from pixelis.actors.node_watch import HeadWatch
from pixelis.config import Config
from pixelis.datasets.bad_rows import BAD_ROW, BadRow
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
SHOWN_MESSAGES = 5
"""Most messages of a run that are printed at once; all are in events.jsonl."""


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
    """Run ``run`` in a thread and show progress from ``poll`` (done, metrics); returns its result or raises
    its error.

    Ctrl-C or SIGTERM asks the learner to stop after its step, calls ``stop``, waits up to ``grace_s`` seconds
    for the last checkpoint and raises Stopped. A second one, and one before the first step, ends the run
    soon.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    start, metrics = poll()
    done, started = start, time.time()
    messages = Messages(Path(config.run.dir), started)
    head = HeadWatch() if ray.is_initialized() else None
    with Progress(name, total, start=start, enabled=config.telemetry.progress) as progress:
        threading.Thread(target=call, name=name, daemon=True).start()
        try:
            while not future.done():
                time.sleep(POLL_S)
                if head is not None:
                    end_without_head(name, head)
                done, metrics = poll()
                if notice := messages.interruption():
                    progress.update(done, waiting=True, status=notice)
                elif not metrics and done == start:
                    progress.update(done, status=messages.stage() or waiting)
                else:
                    progress.update(done, **metrics)
                messages.show()
            done, metrics = poll()
            progress.update(done, **metrics)
            messages.show()
        except KeyboardInterrupt:
            stop_file(config).touch()
            stop()
            print(
                "stopping: the learner writes a checkpoint after this step; Ctrl-C ends at once",
                file=sys.stderr,
                flush=True,
            )
            deadline = time.monotonic() + (grace_s if done > start else min(grace_s, START_STOP_S))
            while not future.done() and time.monotonic() < deadline:
                time.sleep(0.1)
            raise Stopped from None
    result = future.result()
    steps = [
        event
        for event in events.read(config.run.dir)
        if event["kind"].startswith("step/") and event["time"] >= started
    ]
    if problem := diagnosis.of_run(steps):
        print(f"warning: {problem}", file=sys.stderr, flush=True)
    return result


class Messages:
    """What a run that began at ``since`` says in its event log."""

    def __init__(self, folder: Path, since: float):
        self.folder, self.since, self.last_shown = folder, since, 0.0

    def stage(self) -> str:
        """The learner's stage before its first step; empty if it is not known."""
        row = events.last(self.folder, events.STAGE)
        return str(row["name"]) if row is not None and row["time"] >= self.since - POLL_S else ""

    def interruption(self) -> str:
        """Why the learners make no steps at the moment: the last notice since their last step; empty if they
        do.
        """
        row = events.last(self.folder, events.NOTICE, "step/sft", "step/policy")
        is_notice = row is not None and row["kind"] == events.NOTICE and row["time"] >= self.since
        return str(row["text"]) if row is not None and is_notice else ""

    def show(self) -> None:
        """Print new failures of a learner, alarms and unusable rows."""
        kinds, after = (events.LEARNER_FAILURE, events.ALARM, BAD_ROW), max(self.since, self.last_shown)
        newest = events.last(self.folder, *kinds)
        if newest is None or newest["time"] <= after:
            return
        rows = [row for row in events.read(self.folder) if row["kind"] in kinds and row["time"] > after]
        for row in rows[-SHOWN_MESSAGES:]:
            if row["kind"] == BAD_ROW:
                message = f"skipped {BadRow(*(row[field] for field in BadRow._fields))}"
            elif row["kind"] == events.ALARM:
                message = f"warning: step {row['step']}: {row['text']}"
            else:
                outcome = "not retried" if row["permanent"] else "restarting from the last checkpoint"
                message = f"learner failed, {outcome}: {row['error']}: {row['message']} ({row['at']})"
            print(message, file=sys.stderr, flush=True)
        self.last_shown = float(newest["time"])


def stop_s() -> float:
    """Seconds that a stopped run may take to save its last step: those that `ray job stop` leaves, less a few
    for the actors.
    """
    job_s = os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "") if os.environ.get("RAY_JOB_SUBMISSION_ID") else ""
    return max(START_STOP_S, float(job_s) - 5) if job_s.replace(".", "", 1).isdigit() else STOP_S


def end_without_head(name: str, head: HeadWatch) -> None:
    """End this process with a message if the head of the cluster has been away for HEAD_S.

    At once, because every further call of Ray, also to stop actors, would wait for the head.
    """
    if (silent := head.silent_s()) < HEAD_S:
        return
    error = InfraFailure(
        f"the head of the Ray cluster at {head.address} has not answered for {silent:.0f} s",
        fix="start the cluster again and repeat the command; a run resumes from its last checkpoint",
    )
    print(f"pixelis {name}: {error}", file=sys.stderr, flush=True)
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
