"""Reinforcement fine-tuning with vLLM as the engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pixelis.telemetry import events

pytestmark = pytest.mark.slow

STEPS = 3


def generators(job: psutil.Process) -> list[psutil.Process]:
    """The generator processes of a job."""
    names = {process: " ".join(process.cmdline()) for process in job.children(recursive=True)}
    return [process for process, name in names.items() if name.startswith("ray::") and "enerator" in name]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_training_on_rollouts_of_vllm_survives_the_kill_of_its_generator(tmp_path: Path, killed: bool) -> None:
    """Engine and learner agree on log-probabilities; a killed generator is replaced, and no group is lost or used twice."""
    pytest.importorskip("vllm")
    run = tmp_path / "run"
    overrides = [
        f"run.dir={run}",
        "engine.name=vllm",
        "engine.workers=1",
        f"rft.steps={STEPS}",
        "rft.prompts_per_step=2",
        "rft.group_size=4",
        "rft.loss.entropy=0.001",  # so that the learner also computes rollouts without an advantage
        "cluster.placement_timeout_s=400",
    ]
    log = (tmp_path / "log").open("w+", encoding="utf-8")
    command = [sys.executable, "-m", "pixelis.jobs.rft", "configs/nano/rft.yaml", *overrides]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=log, stderr=subprocess.STDOUT, text=True) as process:
        try:
            job = psutil.Process(process.pid)
            while process.poll() is None and not (run.is_dir() and events.read(run, "step/policy")):
                time.sleep(0.2)
            victims = generators(job) if killed and process.poll() is None else []
            engines = [child for victim in victims for child in victim.children(recursive=True)]
            for victim in victims:
                victim.kill()
            _, alive = psutil.wait_procs(engines, timeout=30)
            code = process.wait(timeout=800)
        finally:
            process.terminate()
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert bool(victims) == bool(engines) == killed, text[-3000:]
    assert not alive, "vLLM outlived its generator"
    assert code == 0, text[-3000:]
    rows = events.read(run, "step/policy")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["policy/drift_max"] < 1e-4 for row in rows), "log-probabilities of engine and learner differ"
    assert all(row["learner/sequences"] == 8 for row in rows), "a group was lost"
    consumed = [json.loads(line) for line in (run / "consumed.jsonl").read_text(encoding="utf-8").splitlines()]
    ids = [id for row in consumed for id in row["ids"]]
    assert len(ids) == len(set(ids)) == 2 * STEPS
