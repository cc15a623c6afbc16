"""The certification of vLLM, in its smoke run on a CPU."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="requires vLLM: make test-vllm")
@pytest.mark.long  # test_parity.py compares more
@pytest.mark.timeout(540)
def test_the_certification_compares_vllm_with_the_learner_before_and_after_an_adapter() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--smoke", "vllm"]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    figures = {
        name: float(value)
        for name, value in re.findall(r"^  . (.+\|.*?) +(\S+)(?:  goal.*)?$", run.stdout, re.MULTILINE)
    }
    assert figures["qwen2_5_vl 3b: mean |difference| before loading"] > 0.02
    for state in ("base", "adapter", "awake", "after a SIGKILL"):
        assert figures[f"qwen2_5_vl 3b, {state}: mean |log-probability - learner's|"] < 0.005
    assert "EngineDeadError" not in run.stdout + run.stderr, "the end of an engine is logged as a failure"
