"""Faults of Ray, each on its own cluster: a full object store (F8), failing RPCs (F9), a lost head (F18)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from own_process import free_port, play, start_rft, wait_for_port

from pixelis.policy import checkpoint
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RecordFigures = Callable[..., None]
CALLS, LEASES = "CoreWorkerService.grpc_client.PushTask", "NodeManagerService.grpc_client.RequestWorkerLease"


def fail(*methods: str) -> str:
    """RAY_testing_rpc_failure: a quarter of the requests and a quarter of the replies of these are lost."""
    often = {
        "num_failures": 100,
        "req_failure_prob": 25,
        "resp_failure_prob": 25,
        "in_flight_failure_prob": 0,
    }
    return json.dumps(dict.fromkeys(methods, often))


@pytest.mark.long  # tests/unit/policy/test_storage.py: object stores that are too small are named beforehand
def test_f08_a_run_goes_on_while_the_object_store_is_full(
    tmp_path: Path, record_figures: RecordFigures
) -> None:
    """F8: another actor holds three times the 80 MB of the store for a while."""
    result = play("own_cluster.py", "store", tmp_path)
    record_figures(**result["step_s"], held_mb=10 * result["held"])
    assert result["spilled"]
    assert result["intact"]
    assert result["restarted"] == [False]
    assert result["failures"] == 0
    assert result["steps"] == list(range(1, 21))
    assert result["trained"] >= 10  # the others had groups without a difference


@pytest.mark.long  # tests/unit/memory/test_memory_shard.py: a known id changes nothing
def test_f09_a_memory_stores_each_experience_once_while_calls_fail(
    tmp_path: Path, record_figures: RecordFigures
) -> None:
    """F9: a quarter of all calls of actors are lost, and of another quarter only the reply."""
    result = play("own_cluster.py", "memory", tmp_path, RAY_testing_rpc_failure=fail(CALLS, LEASES))
    record_figures(**result)
    assert result == {"acknowledged": 40, "readable": 40, "listed": 40, "ids": 40}


@contextmanager
def head(port: int) -> Iterator[psutil.Popen]:
    """A Ray head in processes of its own."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
    command += ["--num-cpus=4", "--object-store-memory=100000000", "--include-dashboard=false"]
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port)
        yield process
    finally:
        kill_tree(process)


def kill_tree(process: psutil.Popen) -> None:
    """SIGKILL a process and all of its descendants."""
    with suppress(psutil.Error):
        for victim in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                victim.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.long  # tests/unit/jobs/test_driver.py: the message
def test_f18_the_loss_of_the_head_ends_a_job_with_a_clear_error_and_the_next_resumes(
    tmp_path: Path, record_figures: RecordFigures
) -> None:
    """F18: every process of the head is killed. Goal: a clear error in 30 s (busy: 90)."""
    settings = [
        "policy.model=nano",
        "rft.prompts_per_step=2",
        "rft.group_size=2",
        "dialogue.max_turn_tokens=16",
    ]
    settings += ["rewards.weights.length=1.0", "learner.checkpoint_every=1", "telemetry.progress=false"]
    port = free_port()

    def start(steps: int) -> subprocess.Popen:
        return start_rft(tmp_path, [*settings, f"rft.steps={steps}"], RAY_ADDRESS=f"127.0.0.1:{port}")

    with head(port) as ray_head:
        job = start(2000)
        try:
            while len(events.read(tmp_path, "step/policy")) < 2:
                assert job.poll() is None, job.communicate()
                time.sleep(0.05)
            kill_tree(ray_head)
            killed = time.monotonic()
            _, text = job.communicate(timeout=200)
            seconds = time.monotonic() - killed
        finally:
            job.kill()
    record_figures(ended_s=seconds, code=job.returncode)
    assert job.returncode == 1, (seconds, text)
    assert "the head of the Ray cluster" in text, text
    assert "Traceback" not in text, text
    assert seconds < 90
    latest = checkpoint.latest(tmp_path)
    assert latest is not None
    reached = checkpoint.step_of(latest)
    with head(port):
        job = start(reached + 2)
        _, text = job.communicate(timeout=300)
    assert job.returncode == 0, text
    assert [row["step"] for row in events.read(tmp_path, "step/policy")] == list(range(1, reached + 3))
