"""Jobs as documented: `ray start --head`, `ray job submit --working-dir .`, with a token."""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from placed_actors import wait_until

from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_adapter
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).with_name("ray"))


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[str, dict[str, str]]]:
    """A separate cluster on free ports: (dashboard address, environment of a client)."""
    # A short path, because the cluster's sockets are below it.
    home = Path(tempfile.mkdtemp(prefix="px-", dir="/tmp"))
    token = home / "token"
    token.write_text(secrets.token_hex(32))
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])  # an activated environment
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"RAY_JOB_STOP_WAIT_TIME_S": "30"}
    names = "", "dashboard-", "dashboard-agent-listen-", "metrics-export-", "ray-client-server-"
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    flags = [f"--{name}port={port}" for name, port in ports.items()]
    flags += [f"--temp-dir={home}/ray", "--num-cpus=4", "--object-store-memory=200000000"]
    log = (home / "head.log").open("w")
    command = [RAY, "start", "--head", "--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    command += flags
    process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_until(lambda: listens(ports["dashboard-"]) or process.poll() is not None, 120, 0.5)
        assert process.poll() is None, (home / "head.log").read_text()
        yield f"http://127.0.0.1:{ports['dashboard-']}", env
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(timeout=3)
        log.close()
        shutil.rmtree(home, ignore_errors=True)


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def run(command: list[str], env: dict[str, str], cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Run a command, bypassing any HTTP proxy of the machine."""
    env = {**env, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=400)


def job(address: str, env: dict[str, str], verb: str, *arguments: str) -> subprocess.CompletedProcess:
    return run([RAY, "job", verb, "--address", address, *arguments], env)


def documented() -> list[str]:
    """The lines of docs/cluster.md that set the authentication and submit a job."""
    (block, *_) = re.findall(
        r"```\n(.*?)```", (ROOT / "docs/cluster.md").read_text(encoding="utf-8"), re.DOTALL
    )
    lines = block.strip().splitlines()
    return [lines[0], *itertools.dropwhile(lambda line: not line.startswith("ray job submit"), lines)]


@pytest.mark.long
def test_a_submitted_job_writes_its_checkpoint_to_the_run_folder_when_it_is_stopped(
    head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, env = head
    export, *submission = documented()
    client = {**env, "RAY_API_SERVER_ADDRESS": address}
    del client["RAY_AUTH_MODE"]
    # The adapter of an SFT run would only cost time here.
    overrides = "policy.adapter=null rft.steps=500 rft.prompts_per_step=2 rft.group_size=2 toolbox.workers=1"
    overrides += " learner.checkpoint_every=500 dialogue.max_turn_tokens=16"
    script = "\n".join([export, *submission]).replace(" -- ", " --no-wait --submission-id first -- ")
    submitted = run(["bash", "-ec", f"{script} {overrides}"], client, tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    folder, deadline = tmp_path / "runs/nano/rft", time.monotonic() + 400
    while len(events.read(folder, "step/policy")) < 2:
        assert time.monotonic() < deadline, job(address, env, "logs", "first").stdout
        time.sleep(0.2)
    stopped = job(address, env, "stop", "first")
    assert "stopped" in stopped.stdout + stopped.stderr
    logs = job(address, env, "logs", "first").stdout
    assert "pixelis rft: stopped" in logs
    assert "(raylet)" not in logs, "warnings of many processes bury the job's messages"
    latest = checkpoint.latest(folder)
    assert latest is not None
    assert load_adapter(latest).tensors
    # tests/chaos/test_learner_faults.py tests that the run resumes from there.
    assert checkpoint.step_of(latest) == len(events.read(folder, "step/policy")) >= 2
    assert not (folder / "lock.json").exists()


@pytest.mark.long  # of Ray; above: the right token
def test_a_client_without_the_token_is_refused(head: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    address, env = head
    client = {**env, "RAY_API_SERVER_ADDRESS": address}
    del client["RAY_AUTH_MODE"]
    without = run(["bash", "-ec", "\n".join(documented()[1:])], client, tmp_path)
    assert without.returncode != 0
    assert "authentication token" in without.stderr.lower(), "docs/cluster.md explains this error"
    wrong_token = {**env, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "other-token")}
    (tmp_path / "other-token").write_text(secrets.token_hex(32))
    submitted = job(address, wrong_token, "submit", "--working-dir", ".", "--", "true")
    assert submitted.returncode != 0


@pytest.mark.long
def test_the_head_lists_the_metrics_of_every_node_for_prometheus(head: tuple[str, dict[str, str]]) -> None:
    home = Path(head[1]["RAY_AUTH_TOKEN_PATH"]).parent
    deadline, pages = time.monotonic() + 240, list[str]()
    while not any("ray_node_cpu_count" in page for page in pages):  # a node's first report takes seconds
        assert time.monotonic() < deadline, [page[:200] for page in pages]
        time.sleep(1)
        listed = json.loads((home / "ray/prom_metrics_service_discovery.json").read_text())
        for target in (target for entry in listed for target in entry["targets"]):
            with suppress(httpx.TransportError):  # addresses are listed before their servers listen
                pages.append(httpx.get(f"http://{target}/metrics", trust_env=False).text)
