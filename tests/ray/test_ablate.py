"""An ablation with real processes: scores of an evaluation, a trial that fails, a stop and its resumption."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from pixelis.config import load
from pixelis.jobs import ablation_trial
from pixelis.jobs.ablate import read_groups
from pixelis.telemetry import events

# tests/unit/jobs/test_ablate.py: the same with a stand-in for the processes
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

FILE = {
    "recipe": "configs/nano/evaluate.yaml",
    "stage": "evaluate",
    "seeds": [1],
    "overrides": ["evaluate.questions=4", "telemetry.trajectories=0", "cluster.cpus=3"],
    "reference": "operations",
    "arms": {"operations": [], "direct": ["toolbox.operations=[]"]},
}


def test_an_ablation_of_evaluations(tmp_path: Path, job: Callable[..., subprocess.Popen]) -> None:
    file, out = tmp_path / "ablation.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump({**FILE, "dir": str(out)}, sort_keys=False))
    stopped = job("ablate", str(file))
    log = out / "operations/seed_1/trial.log"
    while "placing" not in (log.read_text() if log.is_file() else ""):
        assert stopped.poll() is None
        time.sleep(0.1)
    children = psutil.Process(stopped.pid).children()
    stopped.send_signal(signal.SIGTERM)
    _, err = stopped.communicate()
    assert stopped.returncode == 130, err
    assert not any(child.is_running() for child in children)

    missing = ["arms={operations: [], direct: ['toolbox.operations=[]'], broken: [policy.adapter=nowhere]}"]
    finished = job("ablate", str(file), *missing)
    text, err = finished.communicate()
    assert finished.returncode == 1
    assert "1 of 3 trials failed:\n  broken, seed 1: pixelis evaluate: " in err
    assert "nowhere" in err
    report = json.loads((out / "report.json").read_text())
    assert [row["arm"] for row in report["arms"]] == ["operations", "direct"], text
    assert report["questions"] == 4
    scores = json.loads((out / "direct/seed_1/result.json").read_text())["scores"]
    assert set(scores["rapr"].values()) == {0.0}
    assert all(question.startswith("held-out/") for question in scores["accuracy"])


@pytest.mark.usefixtures("ray_cluster")
def test_the_policy_evaluated_after_training_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    overrides = [
        f"run.dir={tmp_path}",
        "rft.steps=1",
        "rft.prompts_per_step=2",
        "rft.group_size=2",
        "learner.lr=0.01",
    ]
    config = load("configs/nano/rft.yaml", [*overrides, "evaluate.questions=4", "telemetry.trajectories=0"])
    folder = tmp_path / "evaluate"
    ablation_trial.run("rft", config)
    answers = texts(folder)
    assert [row["version"] for row in events.read(folder, "evaluate")] == [1]
    ablation_trial.run("rft", config)
    # The first version of new actors
    assert [row["version"] for row in events.read(folder, "evaluate")] == [0]
    assert texts(folder) == answers
    assert len(events.read(tmp_path, "step/policy")) == 1


def texts(folder: Path) -> dict[str, list[str]]:
    """What the policy wrote, by question."""
    return {
        name: [turn.text for trajectory in group.trajectories for turn in trajectory.turns]
        for name, group in read_groups(folder).items()
    }
