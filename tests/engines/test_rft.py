"""Reinforcement fine-tuning with vLLM as the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pixelis.telemetry import events

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
def test_the_embedded_model_is_trained_on_rollouts_of_vllm(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    overrides = [
        f"run.dir={tmp_path / 'run'}",
        "engine.name=vllm",
        "rft.steps=2",
        "rft.prompts_per_step=2",
        "rft.group_size=4",
        "rft.loss.entropy=0.001",  # so that the learner also computes rollouts without an advantage
        "cluster.placement_timeout_s=400",
    ]
    job = [sys.executable, "-m", "pixelis.jobs.rft", "configs/nano/rft.yaml", *overrides]
    process = subprocess.run(job, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=580, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    rows = events.read(tmp_path / "run", "step/policy")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["policy/drift_max"] < 1e-4 for row in rows), "log-probabilities of engine and learner differ"
    assert all(row["learner/sequences"] == 8 for row in rows)
