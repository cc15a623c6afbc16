"""Starts a learner: Ray Train runs the training loop on its workers and restarts them from the last checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.actors.train_job import TrainJob
from pixelis.actors.train_loop import train_loop
from pixelis.errors import InfraFailure
from pixelis.policy import checkpoint


def fit(job: TrainJob, datasets: dict[str, Any] | None = None) -> Path | None:
    """Run a learner to the end of its source; returns the last checkpoint of the run, None when there is no step in it.

    Raises the error that stopped it.
    """
    import ray.train
    from ray.data import ExecutionOptions
    from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    run_dir, learner = job.config.run.dir, job.config.learner
    done = checkpoint.latest(run_dir)
    if done is not None and checkpoint.step_of(done) >= job.source.steps:
        return done
    trainer = TorchTrainer(
        functools.partial(train_loop, job),
        scaling_config=ScalingConfig(
            num_workers=learner.workers,
            use_gpu=learner.gpus > 0,
            resources_per_worker={"CPU": learner.cpus, **({"GPU": learner.gpus} if learner.gpus else {})},
        ),
        run_config=RunConfig(
            name="train",
            storage_path=str(Path(run_dir).resolve()),
            failure_config=FailureConfig(max_failures=learner.max_failures),
        ),
        torch_config=TorchConfig(backend="nccl" if learner.gpus else "gloo"),
        datasets=datasets or {},
        # Each worker has a dataset of its own, which is not split. Train does not take the options that it was made with;
        # resuming by number needs its order.
        dataset_config=DataConfig([], ExecutionOptions(preserve_order=True)),
    )
    try:
        trainer.fit()
    except ray.train.v2.api.exceptions.TrainingFailedError as error:
        cause = unwrap_ray_error(error)
        if cause is None:
            last = str(error).strip().splitlines()[-1]
            cause = InfraFailure(f"training failed: {last}", fix="see the worker logs of the Ray session")
        raise cause from error
    return checkpoint.latest(run_dir)
