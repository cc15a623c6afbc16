"""Programs of the chaos tests in processes and clusters of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BARE = ROOT / "tests/ray/bare.yaml"
"""An empty configuration file: processes and tests use the defaults."""


def play(program: str, case: str, folder: Path, **variables: str) -> dict[str, Any]:
    """The result of a case of ``program``, a file of this folder."""
    path = os.pathsep.join(map(str, (ROOT, HERE, ROOT / "tests/serve")))
    env = {**os.environ, "PYTHONPATH": path, **variables}
    env.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(HERE / program), case, str(folder)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550, check=False)
    results = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, run.stdout[-3000:] + run.stderr[-3000:]
    return json.loads(results[0].removeprefix("RESULT "))


def start_rft(folder: Path, settings: list[str], **variables: str) -> subprocess.Popen:
    """An RFT job in its own session, whose output is one stream each."""
    command = [sys.executable, "-m", "pixelis.jobs.rft", str(BARE), *settings, f"run.dir={folder}"]
    env = {**os.environ, **variables}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, start_new_session=True, **pipes)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int, timeout_s: float = 120) -> None:
    """Wait until a process listens."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "the head did not start"
            time.sleep(0.2)
