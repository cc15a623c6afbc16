"""Failures of the learner: the cause is reported, and what a restart cannot fix is not retried."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.cloudpickle

from pixelis.actors import learner
from pixelis.actors.batch_sources import BatchSource
from pixelis.actors.train_job import TrainJob
from pixelis.config import Config, load
from pixelis.errors import DataFailure, PixelisError
from pixelis.operations.environment import select_environments
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster")]


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file


class FailingSource(BatchSource):
    """A source that fails as soon as the learner has loaded its policy and the run's environments."""

    kind, steps = "sft", 3

    def __init__(self, config: Config, error: Exception):
        self.config, self.error = config, error

    def begin(self, state: dict[str, Any]) -> None:
        select_environments(self.config.toolbox)
        raise self.error

    next = done = lambda *_: None  # type: ignore[assignment]


@pytest.mark.long  # below: in this process
def test_a_programming_error_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    environments = "toolbox.environments=[docs/examples/grid_walk.py:GridWalk]"  # from the driver's folder
    config = load(None, [f"run.dir={tmp_path}", "learner.max_failures=1", environments])
    source = FailingSource(config, IndexError("index 151655 is out of range"))
    with pytest.raises(PixelisError, match="IndexError: index 151655 is out of range") as caught:
        learner.fit(TrainJob(config, source))
    assert "(test_learner.py:" in caught.value.message
    (failure,) = events.read(tmp_path, events.LEARNER_FAILURE)
    assert failure["permanent"]
    assert "raise self.error" in failure["traceback"]
    assert [row["name"] for row in events.read(tmp_path, events.STAGE)][-1] == "waiting for the first batch"


def test_a_programming_error_is_permanent_and_named_with_its_line(tmp_path: Path, job: TrainJob) -> None:
    with pytest.raises(KeyError):
        learner._guarded(lambda _: {}["missing"], job, "first")
    error = learner._permanent_failure(str(tmp_path), "first")
    assert error is not None
    assert "KeyError: 'missing' (test_learner.py:" in error.message


@ray.remote(num_cpus=0)
def find_nothing() -> None:
    raise DataFailure("no question has a majority", fix="more samples")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainJob:
    """A job whose learner runs in this process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the worker sets it
    monkeypatch.setattr(learner, "_log_nodes", lambda *_: None)
    return TrainJob(load(None, [f"run.dir={tmp_path}"]), FailingSource(load(None), DataFailure("unused")))


def test_a_typed_error_of_another_actor_keeps_its_type_and_fix(tmp_path: Path, job: TrainJob) -> None:
    with pytest.raises(DataFailure):
        learner._guarded(lambda _: ray.get(find_nothing.remote()), job, "first")
    error = learner._permanent_failure(str(tmp_path), "first")
    assert isinstance(error, DataFailure)
    assert (error.message, error.fix) == ("no question has a majority", "more samples")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no niceness of their own")
def test_the_learner_of_a_service_yields_to_its_generators(job: TrainJob) -> None:
    niceness: dict[bool, int] = {}

    def loop(job: TrainJob) -> None:
        niceness[job.background] = os.getpriority(os.PRIO_PROCESS, 0)

    for background in (False, True):
        job = dataclasses.replace(job, background=background)
        thread = threading.Thread(target=learner._guarded, args=(loop, job, "first"))
        thread.start()
        thread.join()
    assert niceness[True] == min(19, niceness[False] + 4)


def test_a_failure_that_a_restart_may_fix_is_not_permanent(tmp_path: Path, job: TrainJob) -> None:
    def lose_a_connection(_: TrainJob) -> None:
        raise RuntimeError("connection closed by peer")

    with pytest.raises(RuntimeError):
        learner._guarded(lose_a_connection, job, "first")
    assert [row["permanent"] for row in events.read(tmp_path, events.LEARNER_FAILURE)] == [False]
    assert learner._permanent_failure(str(tmp_path), "first") is None
