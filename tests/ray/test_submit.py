"""The documented way onto a cluster: `ray start --head`, `ray job submit --working-dir .`, with token authentication."""

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
    """A cluster of its own on free ports: (dashboard address, environment of a client). Only its own processes are ended."""
    # A short path: sockets of the cluster lie below it.
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
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up:
        assert process.poll() is None, log.read_text()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.5)
    raise AssertionError(log.read_text())


def job(address: str, env: dict[str, str], verb: str, *more: str) -> subprocess.CompletedProcess:
    # A machine's proxy must not stand between the client and its own head.
    env = {**env, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    line = [RAY, "job", verb, "--address", address, *more]
    return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)


def submit(address: str, env: dict[str, str], *command: str) -> subprocess.CompletedProcess:
    return job(address, env, "submit", "--working-dir", ".", "--", *command)


def test_a_submitted_job_leaves_its_checkpoints_where_it_was_told_also_when_stopped(
    head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, env = head
    python = Path(sys.executable).as_posix()
    few = [
        "policy.model=nano",
        "rft.prompts_per_step=2",
        "rft.group_size=2",
        "learner.checkpoint_every=500",
        f"run.dir={tmp_path}/run",
    ]
    rft = (python, "-m", "pixelis.jobs.rft", "configs/nano/rft.yaml", *few)
    longer = (*rft, "rft.steps=500")
    begun = job(address, env, "submit", "--working-dir", ".", "--no-wait", "--submission-id", "first", "--", *longer)
    assert begun.returncode == 0, begun.stderr
    give_up = time.monotonic() + 400
    while len(events.read(tmp_path / "run", "step/policy")) < 2:
        assert time.monotonic() < give_up, job(address, env, "logs", "first").stdout
        time.sleep(0.2)
    stopped = job(address, env, "stop", "first")
    assert "stopped" in stopped.stdout + stopped.stderr
    told = job(address, env, "logs", "first").stdout
    assert "pixelis rft: stopped" in told
    latest = checkpoint.latest(tmp_path / "run")
    assert latest is not None
    assert load_adapter(latest).tensors
    made = checkpoint.step_of(latest)
    assert made == len(events.read(tmp_path / "run", "step/policy")) >= 2
    assert not (tmp_path / "run" / "lock.json").exists()

    # That it goes on from there is in tests/chaos/test_learner_faults.py.
    checked = submit(address, env, *rft, "--dry-run")
    told = checked.stdout + checked.stderr
    assert checked.returncode == 0, told
    assert "checks of rft" in told
    assert "succeeded" in told

    nobody = {**env, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "other-token")}
    (tmp_path / "other-token").write_text(secrets.token_hex(32))
    refused = submit(address, nobody, "true")
    assert refused.returncode != 0, "without the token nobody gets in"
