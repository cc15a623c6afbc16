"""A generator that cannot start again at first."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayError

from pixelis.actors.generator import Generator
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import load
from pixelis.policy.model_path import resolve

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_a_killed_generator_starts_again_once_its_model_can_be_loaded(
    ray_cluster: None, tmp_path: Path
) -> None:
    model, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(resolve("nano"), model)
    store = PolicyStore.options(name="restart-store").remote(str(tmp_path))  # type: ignore[attr-defined]
    overrides = [f"policy.model={model}", f"run.dir={tmp_path}", "toolbox.workers=1", "toolbox.cpus=0"]
    config = load("configs/nano/base.yaml", overrides)
    actor = Generator.options(num_cpus=0).remote(config, "restart-store")  # type: ignore[attr-defined]
    try:
        pid = ray.get(actor.health.remote(), timeout=120)["pid"]
        model.rename(away)
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):  # the process ends, and its successor fails
            with pytest.raises(RayError):
                ray.get(actor.load.remote(0), timeout=60)
        away.rename(model)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                assert ray.get(actor.load.remote(0), timeout=60) == 0
                break
            except RayError:
                time.sleep(0.2)
        assert ray.get(actor.health.remote(), timeout=10)["pid"] != pid
    finally:
        ray.kill(actor)
        ray.kill(store)
