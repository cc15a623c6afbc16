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


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_vl",
        # test_parity.py compares this one with the learner, too.
        pytest.param("qwen2_5_vl", marks=pytest.mark.long),
        *(
            pytest.param(f, marks=pytest.mark.long)
            for f in ("qwen2_vl", "qwen2", "qwen3", "qwen3_vl_moe", "internvl")
        ),
    ],
)
def test_a_family_passes_on_vllm(family: str, tmp_path: Path) -> None:
    tiny_model.make(tmp_path / "tiny", family)
    row = adopt.certificate(str(tmp_path / "tiny"), engine="vllm")
    assert row["failed"] == []
    prompt = next(check for check in row["checks"] if check["name"] == "prompt")
    if prompt["state"] == "ok" and FAMILIES[family].reads_images:
        assert prompt["detail"] == "expanded by AutoProcessor"
