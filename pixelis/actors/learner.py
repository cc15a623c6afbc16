"""Starts a learner: Ray Train runs the training loop on its workers."""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError

from pixelis import errors
from pixelis.actors.cluster import unwrap_ray_error, use_reserved_gpus
from pixelis.actors.node_watch import NodeWatch
from pixelis.actors.reservations import (
    Room,
    describe,
    describe_cluster,
    fitting_learners,
    learner_bundle,
    requested_learners,
    wait_reserved,
)
from pixelis.actors.train_job import TrainJob
from pixelis.actors.train_loop import train_loop
from pixelis.config import Config
from pixelis.errors import InfraFailure, PixelisError
from pixelis.policy import checkpoint
from pixelis.telemetry import events
from pixelis.telemetry.events import EventLog

PLACED = "learner/placed"
"""Event with the node of each learner, in the order of their ranks."""
ROOM_POLL_S = 5.0
REPEAT_S = 15.0
"""Seconds after which the notice about what the learners wait for is repeated."""
PERMANENT = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    NameError,
    AssertionError,
    ImportError,
    NotImplementedError,
)
"""Errors of code or data, which would occur again after a restart from the last checkpoint."""


def fit(job: TrainJob, datasets: dict[str, Any] | None = None, name: str = "") -> Path | None:
    """Train until the source ends; returns the last checkpoint of the run, or None if it took no step.

    Failures of machines are retried `learner.max_failures` times from the last checkpoint, when there is room
    for the learners or for `learner.min_workers` of them, announced ends of nodes without limit; errors of code
    or data are raised. name: prefix of the job's placement groups.
    """
    config = job.config
    latest = checkpoint.latest(config.run.dir, verify=False)  # the workers verify it
    if latest and checkpoint.step_of(latest) >= job.source.steps and checkpoint.is_complete(latest):
        return latest
    from ray.train.v2.api import exceptions

    attempt = uuid.uuid4().hex
    with requested_learners(config, name) as (groups, room):
        # Ray Train would wait for its resources without a message
        wait_reserved(groups, config.cluster.placement_timeout_s)

    def learners() -> dict[int, str]:
        event = events.last(config.run.dir, PLACED)
        return dict(enumerate(event["nodes"])) if event is not None and event["attempt"] == attempt else {}

    def lost(node: str, address: str, names: list[str]) -> None:
        effect = "its groups are rolled out again"
        if any(name.startswith("learner") for name in names):
            effect = f"the learners resume from {_resume_point(config)}"
        _notice(config, f"node {address} ({node[:6]}) was lost with {', '.join(names)}: {effect}")

    with NodeWatch(name, learners, lost):
        failures = 0
        while True:
            try:
                _train(functools.partial(_guarded, train_loop, job, attempt), config, datasets or {}, room)
                break
            except (exceptions.TrainingFailedError, ActorUnavailableError) as error:
                failures += not isinstance(error, exceptions.PreemptionError)
                permanent = _permanent_failure(config.run.dir, attempt)
                if permanent or failures > config.learner.max_failures:
                    last = str(error).strip().splitlines()[-1]
                    other = InfraFailure(f"training failed: {last}", fix="see Ray's worker logs")
                    raise (permanent or unwrap_ray_error(error) or other) from error
            if (found := _wait_for_room(config, name, elastic=not datasets)) is None:
                break
            room = found
    if failure := _permanent_failure(config.run.dir, attempt):
        raise failure
    return checkpoint.latest(config.run.dir, verify=False)


def _train(run: Callable[[], None], config: Config, datasets: dict[str, Any], room: Room) -> None:
    from ray.data import ExecutionOptions
    from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    learner = config.learner
    # The other ranks wait for the first, which alone waits for loads and evaluations
    timeout_s = max(1800.0, 2 * (config.load_timeout_s + config.rollout_timeout_s))
    # Paths such as my_reward.py:score are relative to the folder of the driver or the job.
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    trainer = TorchTrainer(
        run,
        scaling_config=ScalingConfig(
            num_workers=room.workers,
            use_gpu=learner.gpus > 0,
            resources_per_worker=learner_bundle(config),
            placement_strategy=room.strategy,
            label_selector=room.labels,
        ),
        run_config=RunConfig(
            name="train",
            storage_path=str(Path(config.run.dir).resolve()),
            # `fit` retries, because it can change the number of workers and tell what is missing.
            failure_config=FailureConfig(
                max_failures=0, controller_failure_limit=0, max_preemption_failures=0
            ),
        ),
        torch_config=TorchConfig("nccl" if learner.gpus else "gloo", timeout_s=int(timeout_s)),
        datasets=datasets,
        # Each worker has its own dataset, so none is split. Train ignores the dataset's own options, and
        # resuming at a step needs the order preserved.
        dataset_config=DataConfig([], ExecutionOptions(preserve_order=True)),
    )
    trainer.fit()


def _wait_for_room(config: Config, name: str, elastic: bool) -> Room | None:
    """Wait for room for the learners, or with `elastic` for `learner.min_workers`; None to stop the run."""
    learner, waiting_since = config.learner, 0.0
    fewest = (learner.min_workers or learner.workers) if elastic else learner.workers
    counts = [
        n
        for n in range(learner.workers, fewest - 1, -learner.sequence_parallel)
        if n == learner.workers or config.rft.prompts_per_step % learner.shares(n) == 0
    ]
    while not (Path(config.run.dir) / "STOP").exists():
        if (fitting := fitting_learners(config, counts, ROOM_POLL_S, name)) is not None:
            some = f"{fitting.workers} of {learner.workers}" if fitting.workers < learner.workers else "the"
            _notice(config, f"{some} learners resume from {_resume_point(config)}")
            return fitting
        if time.monotonic() - waiting_since > REPEAT_S:
            waiting_since = time.monotonic()
            missing = f"{fewest} x {describe([learner_bundle(config)])} ({describe_cluster()})"
            then = f"the run then resumes from {_resume_point(config)}"
            _notice(config, f"waiting for room for {missing}: {then}", waiting=True)
    return None


def _resume_point(config: Config) -> str:
    latest = checkpoint.latest(config.run.dir, verify=False)
    return f"step {checkpoint.step_of(latest)}" if latest else "step 0, as there is no checkpoint"


def _notice(config: Config, text: str, waiting: bool = False) -> None:
    print(text, file=sys.stderr, flush=True)
    with suppress(OSError), EventLog(config.run.dir) as log:  # the disk may be full
        log.write(events.NOTICE, text=text, waiting=waiting)


def _guarded(loop: Callable[[TrainJob], None], job: TrainJob, attempt: str) -> None:
    """Run the loop and write failures as events; nothing after a permanent failure in this attempt."""
    run_dir = job.config.run.dir
    if not job.config.learner.gpus:  # Ray Train chooses the GPU of a learner that reserves one
        use_reserved_gpus()
    if job.background:
        os.nice(4)  # as the generators: a learner must not delay replies
    if _permanent_failure(run_dir, attempt):
        return
    try:
        _log_nodes(run_dir, attempt)
        loop(job)
    except Exception as error:
        # Of this process or another actor
        typed = unwrap_ray_error(error) if isinstance(error, PixelisError | OSError) else None
        permanent = isinstance(error, PERMANENT) if typed is None else not isinstance(typed, InfraFailure)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        with suppress(OSError), EventLog(run_dir) as log:  # the disk may be full
            log.write(
                events.LEARNER_FAILURE,
                attempt=attempt,
                permanent=permanent,
                error=type(typed or error).__name__,
                message=typed.message if typed else f"{error}",
                fix=typed.fix if typed else None,
                at=f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}",
                traceback=traceback.format_exc(limit=-12),
            )
        raise


def _log_nodes(run_dir: str, attempt: str) -> None:
    import torch.distributed as dist

    node = ray.get_runtime_context().get_node_id()
    nodes = [node] * dist.get_world_size()
    dist.all_gather_object(nodes, node)
    if dist.get_rank() == 0:
        with EventLog(run_dir) as log:
            log.write(PLACED, attempt=attempt, nodes=nodes)


def _permanent_failure(run_dir: str, attempt: str) -> PixelisError | None:
    event = events.last(run_dir, events.LEARNER_FAILURE)
    if event is None or event["attempt"] != attempt or not event["permanent"]:
        return None
    kind = getattr(errors, event["error"], None)
    if isinstance(kind, type) and issubclass(kind, PixelisError):
        return kind(event["message"], fix=event["fix"])
    message = f"a learner failed with {event['error']}: {event['message']} ({event['at']})"
    fix = "the last `learner/failure` event in run.dir/events.jsonl has the traceback"
    return PixelisError(message, code="learner_failed", fix=fix)
