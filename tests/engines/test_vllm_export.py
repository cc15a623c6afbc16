"""vLLM serves the merged folder of `pixelis export` like any other model."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import start
from test_parity import GREEDY, check_greedy, run_all, sample_episodes
from tiny_policy import Maker, folder, policy, random_adapter

from pixelis.jobs.export import export
from pixelis.policy.adapters import save_adapter
from pixelis.policy.lora import BaseWeights, merge_into
from pixelis.policy.model import load_model

FAMILY = "qwen3_vl"


@pytest.mark.slow
@pytest.mark.long  # tests/unit/policy/test_export.py: transformers loads what is exported
def test_vllm_serves_an_exported_model(tmp_path: Path) -> None:
    adapter, merged = random_adapter(FAMILY), tmp_path / "merged"
    save_adapter(adapter, tmp_path / "step_00000001")
    export(tmp_path / "step_00000001", merged, merge=True, model=str(folder(FAMILY)))
    model = load_model(policy(FAMILY), "cpu")[0]
    merge_into(model, BaseWeights(), adapter)
    for running in start("vllm", merged, policy(FAMILY, model=str(merged)), FAMILY):

        async def body(engine) -> None:
            samples = await run_all(engine, sample_episodes(Maker(FAMILY)), [GREEDY] * 7)
            assert max(check_greedy(model, sample, engine.spec.banned) for sample in samples) < 1e-4

        running.run(body)
