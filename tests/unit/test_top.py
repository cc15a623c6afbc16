"""`pixelis top` on a run and its errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pixelis.jobs.top import curve
from pixelis.telemetry.events import EventLog


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pixelis.jobs.top", *arguments], capture_output=True, text=True)


def test_a_run_is_drawn_with_its_curves_and_alarms(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        log.write("stage", name="starting the engine")
        first = top(str(tmp_path), "--once").stdout
        for step in range(1, 21):
            values = {"train/accuracy": step / 20, "policy/kl": step / 100, "operation/zoom_in": 0.5, "stop/answer": 1.0}
            log.write("step/policy", step=step, **values)
        log.write("step/policy", step=20, **{"train/accuracy": 0.25, "policy/kl": 0.2})  # repeated after a resume
        log.write("evaluation", step=20, **{"evaluate/accuracy": 0.875})
        log.write("notice", text="waits for a node")
    assert "no step yet: starting the engine" in first
    shown = top(str(tmp_path), "--once")
    assert shown.returncode == 0
    assert "step 20" in shown.stdout
    assert "0.05 to 0.95" in shown.stdout  # the repeated step counts once
    assert "0.875" in shown.stdout
    assert "KL to the start" in shown.stdout
    assert "waits for a node" in shown.stdout


def test_what_cannot_be_watched_is_named_with_a_fix(tmp_path: Path) -> None:
    for arguments, code in (((str(tmp_path), "--once"), 1), (("http://127.0.0.1:9", "--once"), 1), ((), 2)):
        refused = top(*arguments)
        assert refused.returncode == code
        assert "fix:" in refused.stderr


def test_a_curve_keeps_its_shape() -> None:
    assert curve([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert curve([0.0] * 500 + [1.0] * 500, 4) == "▁▁██"
    assert curve([2.0, 2.0]) == "▁▁"
    assert curve([]) == ""
    assert curve([float("nan"), 1.0]) == "▁"
