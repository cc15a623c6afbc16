"""Starts a learner: Ray Train runs the training loop on its workers and restarts them from the last checkpoint."""

from __future__ import annotations

import functools
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pixelis import errors
from pixelis.actors.cluster import unwrap_ray_error, use_reserved_gpus
from pixelis.actors.reservations import learner_bundle, reserved_learners
from pixelis.actors.train_job import TrainJob
from pixelis.actors.train_loop import train_loop
from pixelis.errors import InfraFailure, PixelisError
from pixelis.policy import checkpoint
from pixelis.telemetry import events
from pixelis.telemetry.events import EventLog

FAILURE = "learner/failure"
"""Event that a failing worker writes. The drivers show it immediately."""
PERMANENT = (LookupError, TypeError, ValueError, AttributeError, NameError, AssertionError, ImportError, NotImplementedError)
"""Errors of code or data, which would occur again after a restart from the last checkpoint."""


def fit(job: TrainJob, datasets: dict[str, Any] | None = None) -> Path | None:
    """Train until the source ends; returns the last checkpoint of the run, or None if it took no step.

    A failing worker writes a `learner/failure` event with its cause. Failures of machines are retried `learner.max_failures`
    times; errors of code or data are not. Raises the error that stopped the run.
    """
    import ray.train
    from ray.data import ExecutionOptions
    from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    run_dir, learner = job.config.run.dir, job.config.learner
    latest = checkpoint.latest(run_dir)
    if latest is not None and checkpoint.step_of(latest) >= job.source.steps:
        return latest
    attempt = uuid.uuid4().hex
    with reserved_learners(job.config) as strategy:
        pass  # Ray Train waits for resources silently
    trainer = TorchTrainer(
        functools.partial(_guarded, train_loop, job, attempt),
        scaling_config=ScalingConfig(
            num_workers=learner.workers,
            use_gpu=learner.gpus > 0,
            resources_per_worker=learner_bundle(job.config),
            placement_strategy=strategy,
        ),
        run_config=RunConfig(
            name="train",
            storage_path=str(Path(run_dir).resolve()),
            failure_config=FailureConfig(max_failures=learner.max_failures),
        ),
        torch_config=TorchConfig(backend="nccl" if learner.gpus else "gloo"),
        datasets=datasets or {},
        # Each worker has its own dataset, so none is split. Train ignores the dataset's own options, and resuming at a step needs
        # the order preserved.
        dataset_config=DataConfig([], ExecutionOptions(preserve_order=True)),
    )
    try:
        trainer.fit()
    except ray.train.v2.api.exceptions.TrainingFailedError as error:
        cause = _permanent_failure(run_dir, attempt) or unwrap_ray_error(error)
        if cause is None:
            last = str(error).strip().splitlines()[-1]
            cause = InfraFailure(f"training failed: {last}", fix="see the worker logs of the Ray session")
        raise cause from error
    if failure := _permanent_failure(run_dir, attempt):
        raise failure
    return checkpoint.latest(run_dir)


def _guarded(loop: Callable[[TrainJob], None], job: TrainJob, attempt: str) -> None:
    """Run the loop, unless it is a restart after a permanent failure in this attempt. Write failures as events."""
    run_dir = job.config.run.dir
    if not job.config.learner.gpus:  # Ray Train chooses the GPU of a learner that reserves one
        use_reserved_gpus()
    if _permanent_failure(run_dir, attempt):
        return
    try:
        loop(job)
    except Exception as error:
        typed = error if isinstance(error, PixelisError) else None
        permanent = isinstance(error, PERMANENT) if typed is None else not isinstance(typed, InfraFailure)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        with EventLog(run_dir) as log:
            log.write(
                FAILURE,
                attempt=attempt,
                permanent=permanent,
                error=type(error).__name__,
                message=typed.message if typed else f"{error}",
                fix=typed.fix if typed else None,
                at=f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}",
                traceback=traceback.format_exc(limit=-12),
            )
        raise


def _permanent_failure(run_dir: str, attempt: str) -> PixelisError | None:
    """The permanent error of this attempt, if any."""
    event = events.last(run_dir, FAILURE)
    if event is None or event["attempt"] != attempt or not event["permanent"]:
        return None
    kind = getattr(errors, event["error"], None)
    if isinstance(kind, type) and issubclass(kind, PixelisError):
        return kind(event["message"], fix=event["fix"])
    message = f"a learner failed with {event['error']}: {event['message']} ({event['at']})"
    return PixelisError(
        message, code="learner_failed", fix="the last `learner/failure` event in run.dir/events.jsonl has the traceback"
    )
