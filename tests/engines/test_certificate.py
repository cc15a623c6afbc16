"""`pixelis adopt --engine vllm`: vLLM generates what the learner scores, before and after updates and exports."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pixelis.families import FAMILIES
from pixelis.jobs import adopt, tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="requires vLLM: make test-vllm"),
]


@pytest.mark.long  # test_parity.py compares vLLM with the learner, too
@pytest.mark.parametrize(
    "family", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen2", "qwen3", "qwen3_vl_moe", "internvl"]
)
def test_a_family_passes_on_vllm(family: str, tmp_path: Path) -> None:
    tiny_model.make(tmp_path / "tiny", family)
    row = adopt.certificate(str(tmp_path / "tiny"), engine="vllm")
    assert row["failed"] == []
    prompt = next(check for check in row["checks"] if check["name"] == "prompt")
    if prompt["state"] == "ok" and FAMILIES[family].reads_images:
        assert prompt["detail"] == "expanded by AutoProcessor"
