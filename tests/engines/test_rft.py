"""Reinforcement fine-tuning with vLLM as the engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from running import generating

from pixelis import config
from pixelis.engines.vllm_files import link_model
from pixelis.families.spec import load_spec
from pixelis.policy.model_path import resolve
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT, STEPS = Path(__file__).parents[2], 3


def generators(job: psutil.Process) -> list[psutil.Process]:
    """The generator processes of a job."""
    names = {process: " ".join(process.cmdline()) for process in job.children(recursive=True)}
    return [process for process, name in names.items() if name.startswith("ray::") and "enerator" in name]


def run(folder: Path, *overrides: str) -> tuple[subprocess.Popen, Path, Path]:
    """Start a job of few steps with vLLM as the engine; returns its process, its run.dir and its log."""
    log, run_dir = folder / "log", folder / "run"
    settings = [
        f"run.dir={run_dir}",
        "engine.name=vllm",
        "engine.workers=1",
        f"rft.steps={STEPS}",
        "rft.prompts_per_step=2",
        "rft.group_size=4",
        "rft.loss.entropy=0.001",  # so that the learner also computes rollouts without an advantage
        "cluster.placement_timeout_s=400",
        *overrides,
    ]
    command = [sys.executable, "-m", "pixelis.jobs.rft", "configs/nano/rft.yaml", *settings]
    with log.open("w", encoding="utf-8") as out:
        return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT), run_dir, log


def check_steps(run_dir: Path) -> None:
    """Engine and learner agree on log-probabilities, no group is lost, and no question is used twice."""
    rows = events.read(run_dir, "step/policy")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["policy/drift_max"] < 1e-4 for row in rows), "engine and learner differ"
    assert all(row["learner/sequences"] == 8 for row in rows), "a group was lost"
    lines = (run_dir / "consumed.jsonl").read_text(encoding="utf-8").splitlines()
    ids = [id for line in lines for id in json.loads(line)["ids"]]
    assert len(ids) == len(set(ids)) == 2 * STEPS


@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", [False, True])
def test_training_on_rollouts_of_vllm_survives_the_kill_of_its_generator(
    tmp_path: Path, killed: bool
) -> None:
    """A killed generator is replaced."""
    pytest.importorskip("vllm")
    process, run_dir, log = run(tmp_path)
    try:
        job = psutil.Process(process.pid)
        while process.poll() is None and not (run_dir.is_dir() and events.read(run_dir, "step/policy")):
            time.sleep(0.2)
        victims = generators(job) if killed and process.poll() is None else []
        engines = [child for victim in victims for child in victim.children(recursive=True)]
        for victim in victims:
            victim.kill()
        _, alive = psutil.wait_procs(engines, timeout=30)
        code = process.wait(timeout=800)
    finally:
        process.terminate()
        process.wait()
    text = log.read_text(encoding="utf-8")
    assert bool(victims) == bool(engines) == killed, text[-3000:]
    assert not alive, "vLLM outlived its generator"
    assert code == 0, text[-3000:]
    check_steps(run_dir)


@pytest.mark.timeout(900)
def test_training_on_rollouts_of_a_server_that_is_already_there(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    recipe, nano = config.load(str(ROOT / "configs/nano/rft.yaml")), resolve("nano")
    model = link_model(nano, tmp_path / "model", load_spec(nano), recipe.dialogue.input.max_pixels)
    with generating(model, tmp_path / "server", recipe.dialogue, recipe.policy.lora.rank) as url:
        own = [
            "engine.name=vllm_server",
            f"engine.urls=[{url}]",
            f"engine.adapter_folder={tmp_path}/adapters",
        ]
        process, run_dir, log = run(tmp_path, *own)
        try:
            assert process.wait(800) == 0, log.read_text(encoding="utf-8")[-3000:]
        finally:
            process.terminate()
            process.wait()
    check_steps(run_dir)
