"""A local cluster on a machine that is too busy for Ray's fixed limits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

LATE_ONCE = """
import pathlib, sys, time
late = pathlib.Path(__file__).with_name("was_late")
if any("dashboard/agent.py" in argument for argument in sys.orig_argv) and not late.exists():
    late.touch()
    time.sleep(20)  # the raylet waits 15 s for this process
"""
SCRIPT = """
import ray
from pixelis.actors.cluster import connect
from pixelis.config import load
connect(load(None))
print("nodes", len(ray.nodes()))
"""


def test_a_start_that_missed_its_limit_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LATE_ONCE, encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    path = os.pathsep.join([str(tmp_path), *filter(None, [env.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**env, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (tmp_path / "was_late").exists()
    assert "starting Ray again" in run.stdout, run.stderr[-3000:]
    assert "nodes 1" in run.stdout, run.stderr[-3000:]
