"""Models whose vLLM computes in bfloat16, or chooses experts: it differs from the learner by rounding alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from running import RunningEngine, start
from test_parity import run_all, sample_episodes
from tiny_policy import LORA, Maker, folder, merged, policy, random_adapter, stock, stock_log_probs

from pixelis.dialogue.session import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.long]
FAMILIES = ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def running(request: pytest.FixtureRequest) -> Iterator[RunningEngine]:
    family = request.param
    lora = LORA.model_copy(update={"vision_tower": family != "qwen3_vl_moe"})
    yield from start("vllm", folder(family), policy(family, dtype="bfloat16", lora=lora), family)


def difference(model: torch.nn.Module, samples: Any, values: np.ndarray) -> float:
    with torch.no_grad():
        own = np.concatenate([stock_log_probs(model, sample).numpy() for sample in samples])
    return float(np.abs(own - values).mean())


async def test_vllm_differs_from_float32_as_transformers_does(running: RunningEngine, engine: Any):
    """With the base model, then two adapters at runtime, also on Gated DeltaNet and the vision tower."""
    assert running.swaps
    for version in range(3):
        model, family = stock(running.family), running.family
        if version:
            adapter = random_adapter(family, seed=version, size=0.05, tower=running.tower)
            await engine.load(version, adapter)
            model = merged(adapter, family)
        samples = []
        for seed in range(3):
            settings = [SamplingParams(1.0, 1.0, 12, seed=7 * seed + i) for i in range(7)]
            samples += await run_all(engine, sample_episodes(Maker(family, seed=seed)), settings)
        log_probs = np.concatenate([sample.log_probs[sample.mask] for sample in samples])
        with torch.no_grad():
            exact = np.concatenate([stock_log_probs(model, sample).numpy() for sample in samples])
        drift = np.abs(exact - log_probs)
        assert drift.mean() < 1.5 * difference(model.bfloat16(), samples, exact)
        assert np.mean(np.exp(drift) > 2) < 0.01  # importance weights above the cap
        if version:
            assert difference(stock(family), samples, log_probs) > 5 * drift.mean()
