"""vLLM serves the merged folder of `pixelis export` like any other model."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import start
from test_parity import GREEDY, check_greedy, run_all, sample_episodes
from tiny_policy import Maker, folder, merged, policy, random_adapter

from pixelis.jobs.export import export
from pixelis.policy.adapters import save_adapter

FAMILY = "qwen3_vl"


@pytest.mark.slow
@pytest.mark.long  # tests/unit/policy/test_export.py: transformers loads what is exported
def test_vllm_serves_an_exported_model(tmp_path: Path) -> None:
    adapter, out = random_adapter(FAMILY), tmp_path / "merged"
    save_adapter(adapter, tmp_path / "step_00000001")
    export(tmp_path / "step_00000001", out, merge=True, model=str(folder(FAMILY)))
    model = merged(adapter, FAMILY)
    episodes = sample_episodes(Maker(FAMILY))
    for running in start("vllm", out, policy(FAMILY, model=str(out)), FAMILY):
        samples = running.runner.run(run_all(running.engine, episodes, [GREEDY] * 7))
        assert max(check_greedy(model, sample, running.spec.banned) for sample in samples) < 1e-4
