"""A mixture of experts in vLLM from files in the published layout, and with adapters that vLLM cannot swap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from running import RunningEngine, start
from test_parity import GREEDY, check_greedy, run_all, sample_episodes
from test_vllm import changed
from tiny_policy import LORA, Maker, fingerprint, merged, policy, published, random_adapter, stock

from pixelis.policy.adapters import Adapter

pytestmark = [pytest.mark.slow, pytest.mark.long]
FAMILY = "qwen3_vl_moe"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    source = published(FAMILY, tmp_path_factory.mktemp("experts") / "published")
    lora = LORA.model_copy(update={"vision_tower": True})
    yield from start("vllm", source, policy(FAMILY, model=str(source), lora=lora), FAMILY)


async def test_experts_the_router_and_the_vision_tower_are_loaded_as_merged_weights(
    running: RunningEngine, engine: Any
):
    """vLLM has no adapters in the vision tower of this model, although its class says so."""
    assert engine.merges
    episodes, banned = sample_episodes(Maker(FAMILY)), running.spec.banned
    before = await run_all(engine, episodes, [GREEDY] * 7)
    assert max(check_greedy(stock(FAMILY), sample, banned) for sample in before) < 1e-4
    model = stock(FAMILY)
    own = fingerprint(running.folder)
    adapter = random_adapter(FAMILY, seed=1, tower=True)
    versions = (
        (Adapter(adapter.tensors, adapter.alpha, adapter.rank, own), merged(adapter, FAMILY)),
        (changed(model, 2, running.folder), model),
    )
    for version, (weights, expected) in enumerate(versions):
        await engine.load(version, weights)
        samples = await run_all(engine, episodes, [GREEDY] * 7)
        assert max(check_greedy(expected, sample, banned) for sample in samples) < 1e-4
        assert not np.array_equal(samples[0].tokens, before[0].tokens)
    await engine.load(9, None)
    after = await run_all(engine, episodes, [GREEDY] * 7)
    assert [s.tokens.tolist() for s in after] == [s.tokens.tolist() for s in before]
