"""A shortened quickstart from a built wheel in an empty folder."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SHORT = [
    *("sft.steps=20", "sft.evaluate_every=10", "sft.validation_size=6", "sft.evaluate_episodes=2"),
    *("rft.steps=2", "rft.prompts_per_step=4", "evaluate.questions=6", "telemetry.trajectories=4"),
    *("evolution.batch=2", "evolution.gate=0.3", "quickstart.stream=8"),
    *("evolution.canary.count=8", "evolution.canary.risk=1"),
    "cluster.placement_timeout_s=400",  # beside other tests, on a slow processor
]


def free_port() -> int:
    """A free port below those that the system gives to others, of which Ray's processes take hundreds."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel of this checkout; dependencies come from the test environment."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("pixelis", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    built = source / "dist"
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", built, source], check=True)
    (wheel,) = built.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    return site


def test_the_quickstart_runs_from_a_wheel_in_an_empty_folder(
    installed: Path, documented_metrics: dict[str, tuple[re.Pattern[str], bool]], tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    print_location = [sys.executable, "-c", "import pixelis; print(pixelis.__file__)"]
    location = subprocess.check_output(print_location, cwd=empty, env=environment, text=True)
    assert location.startswith(str(installed))
    command = [sys.executable, "-m", "pixelis.jobs.cli", "quickstart", *SHORT, f"run.dir={tmp_path}/run"]
    command.append(f"serve.port={free_port()}")
    done = subprocess.run(
        command, cwd=empty, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    output, errors = done.stdout, done.stderr
    assert done.returncode == 0, errors[-3000:]
    assert "Traceback" not in errors

    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert [arm["name"] for arm in summary["arms"]] == ["direct", "sft", "rft", "evolved"]
    for arm in summary["arms"]:
        assert arm["n"] == 6
        assert 0 <= arm["ci95"][0] <= arm["accuracy"] <= arm["ci95"][1] <= 1
        assert arm["name"] in output
    direct = summary["arms"][0]
    assert (direct["rapr"], direct["turns"]) == (0.0, 1.0), "the direct arm has no operations"
    assert {"install", "sft", "rft", "evaluate", "serve"} <= set(summary["seconds"])
    assert set(summary["paired"]["rft_minus_sft"]) >= {"mean", "ci95"}
    assert summary["shift"]["requests"] == 8
    assert summary["seed"] == 42

    evaluations = [row for row in events.read(folder / "sft", "step/sft") if "evaluate/loss" in row]
    assert [row["step"] for row in evaluations] == [10, 20]
    names = {"evaluate/accuracy", "evaluate/rapr", "evaluate/turns", "evaluate/tool_error_rate"}
    assert all(names <= set(row) for row in evaluations)

    report = (folder / "report.html").read_text()
    assert str(folder / "report.html") in output
    assert report.count("data:image/") >= 4, "pictures are inside the page"
    assert "http://" not in report.replace("http://www.w3.org", "")
    steps = events.read(folder / "rft", "step/policy")
    assert [row["step"] for row in steps] == [1, 2]
    patterns = [pattern for pattern, _ in documented_metrics.values()]
    required = [pattern for pattern, always in documented_metrics.values() if always]
    for row in steps:
        logged = [key for key in row if "/" in key]
        assert [key for key in logged if not any(pattern.fullmatch(key) for pattern in patterns)] == []
        assert [pattern for pattern in required if not any(map(pattern.fullmatch, logged))] == []
    assert (folder / "rft" / "rollouts.jsonl").read_text().count("\n") == 2 * 2
