"""Smoke run of every benchmark. The measured values mean nothing here; see benchmarks/README.md."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ray

from pixelis.config import load
from pixelis.policy.adapters import Adapter, save_adapter
from pixelis.policy.lora import adapted_layers
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint, resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster")]
ROOT = Path(__file__).parents[2]
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py")}
NAMES = sorted(name for name, source in SOURCES.items() if "def main" in source)
NAMES.remove("service_load")  # the load generator, which `service` starts
REQUIREMENTS = {"grpo_step": "trl"}
LONG = {"async_overlap", "capabilities", "conversation", "coordinator", "curriculum", "data_stream"}
LONG |= {
    "distillation",
    "every_preset",
    "forgetting",
    "gpu",
    "learning_trap",
    "look_less",
    "memory",
    "one_copy",
    "operations",
}
LONG |= {"rank_recovery", "robustness", "service", "soak", "vote_learning", "words"}
LONG |= {
    "actor_overhead",
    "agent_online",
    "cluster_model",
    "looking",
    "outside_agent",
    "refinement",
    "results",
    "weight_transfer",
}
"""Benchmarks whose smoke run takes long, most of it to start jobs, models or actors."""
OWN_PROCESS = {"distillation", "learning_trap", "memory"}
"""Benchmarks that end their connection to Ray, or fork, which is unsafe in a process with Ray's threads."""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of adapters that do not change the embedded model."""
    folder, policy = tmp_path_factory.mktemp("adapter"), load(ROOT / "configs/nano/base.yaml").policy
    lora, tensors = policy.lora, {}
    for name, layer in adapted_layers(load_model(policy, "cpu")[0], lora.targets).items():
        tensors[f"{name}.A"] = np.full((lora.rank, layer.in_features), 0.01, np.float32)
        tensors[f"{name}.B"] = np.zeros((layer.out_features, lora.rank), np.float32)
    save_adapter(Adapter(tensors, lora.alpha, lora.rank, fingerprint(resolve("nano"))), folder)
    return folder


def test_the_readme_lists_every_benchmark() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"| `{name}" not in readme] == []


@pytest.mark.parametrize("name", sorted(LONG))
def test_the_options_of_a_long_benchmark_are_shown(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "--smoke" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in NAMES]
)
def test_a_benchmark_runs(
    name: str, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    source = SOURCES[name]
    assert "parse_args(parser" in source, "no smoke run: parse the options with harness.parse_args"
    options = {"--adapter": str(adapter), "--dir": str(tmp_path)}
    if name in REQUIREMENTS and importlib.util.find_spec(REQUIREMENTS[name]) is None:
        pytest.skip(f"{name} requires {REQUIREMENTS[name]}, which is not installed")
    arguments = ["--smoke"]
    for option, value in options.items():
        arguments += [option, value] if f'"{option}"' in source else []
    if name in OWN_PROCESS:
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        process = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert process.returncode == 0, process.stderr
        return
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    code = None
    try:
        importlib.import_module(f"benchmarks.{name}").main()
    except SystemExit as error:
        code = error.code
    assert not code, capfd.readouterr().err
    assert ray.is_initialized(), "the benchmark stopped the shared Ray cluster"
