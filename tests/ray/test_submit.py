"""Jobs on a cluster as documented: `ray start --head`, `ray job submit --working-dir .`, with token authentication."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_adapter
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).with_name("ray"))


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@pytest.fixture
def head() -> Iterator[tuple[str, dict[str, str]]]:
    """A separate cluster on free ports: (dashboard address, environment of a client)."""
    # A short path, because the cluster's sockets are below it.
    home = Path(tempfile.mkdtemp(prefix="px-", dir="/tmp"))
    token = home / "token"
    token.write_text(secrets.token_hex(32))
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"RAY_JOB_STOP_WAIT_TIME_S": "30"}
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "metrics-export-port", "ray-client-server-port")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    flags = [f"--{name}={port}" for name, port in ports.items()]
    flags += [f"--temp-dir={home}/ray", "--num-cpus=4", "--object-store-memory=200000000", "--disable-usage-stats"]
    log = (home / "head.log").open("w")
    command = [RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", *flags]
    process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for_port(ports["dashboard-port"], process, home / "head.log")
        yield f"http://127.0.0.1:{ports['dashboard-port']}", env
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(timeout=10)
        log.close()
        shutil.rmtree(home, ignore_errors=True)


def wait_for_port(port: int, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.5)
    raise AssertionError(log.read_text())


def job(address: str, env: dict[str, str], verb: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run `ray job VERB`, bypassing any HTTP proxy of the machine."""
    env = {**env, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [RAY, "job", verb, "--address", address, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)


def submit(address: str, env: dict[str, str], *command: str) -> subprocess.CompletedProcess:
    return job(address, env, "submit", "--working-dir", ".", "--", *command)


def test_a_submitted_job_writes_its_checkpoint_to_the_run_folder_when_it_is_stopped(
    head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, env = head
    python = Path(sys.executable).as_posix()
    overrides = [
        "policy.model=nano",
        "rft.prompts_per_step=2",
        "rft.group_size=2",
        "learner.checkpoint_every=500",
        f"run.dir={tmp_path}/run",
    ]
    rft = (python, "-m", "pixelis.jobs.rft", "configs/nano/rft.yaml", *overrides)
    long_run = (*rft, "rft.steps=500")
    submitted = job(address, env, "submit", "--working-dir", ".", "--no-wait", "--submission-id", "first", "--", *long_run)
    assert submitted.returncode == 0, submitted.stderr
    deadline = time.monotonic() + 400
    while len(events.read(tmp_path / "run", "step/policy")) < 2:
        assert time.monotonic() < deadline, job(address, env, "logs", "first").stdout
        time.sleep(0.2)
    stopped = job(address, env, "stop", "first")
    assert "stopped" in stopped.stdout + stopped.stderr
    assert "pixelis rft: stopped" in job(address, env, "logs", "first").stdout
    latest = checkpoint.latest(tmp_path / "run")
    assert latest is not None
    assert load_adapter(latest).tensors
    assert checkpoint.step_of(latest) == len(events.read(tmp_path / "run", "step/policy")) >= 2
    assert not (tmp_path / "run" / "lock.json").exists()

    # tests/chaos/test_learner_faults.py tests that the run resumes from there.
    dry_run = submit(address, env, *rft, "--dry-run")
    output = dry_run.stdout + dry_run.stderr
    assert dry_run.returncode == 0, output
    assert "checks of rft" in output
    assert "succeeded" in output

    wrong_token = {**env, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "other-token")}
    (tmp_path / "other-token").write_text(secrets.token_hex(32))
    assert submit(address, wrong_token, "true").returncode != 0, "a client with a wrong token is refused"
