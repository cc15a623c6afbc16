"""Qwen3-VL's mixture of experts: parity with transformers, rollouts, exports in the published layout."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import Maker, folder, policy, spec, stock, stock_log_probs
from torch.utils.flop_counter import FlopCounterMode

from pixelis import config
from pixelis.dialogue.session import SamplingParams
from pixelis.engines.hf import HfEngine
from pixelis.engines.vllm_files import link_model
from pixelis.errors import BadConfig
from pixelis.policy import estimate
from pixelis.policy.adapters import Adapter
from pixelis.policy.architecture import Architecture
from pixelis.policy.export import write_merged_model
from pixelis.policy.flops import FlopCounter
from pixelis.policy.model import load_model
from pixelis.policy.samples import TrainSample
from pixelis.policy.train_step import Trainer

FAMILY = "qwen3_vl_moe"
LORA = config.LoraConfig(rank=4, alpha=8, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
LEARNER = config.LearnerConfig(lr=3e-3, warmup=0.0, row_tokens=512, rows=2)


def train(full: bool) -> tuple[Adapter, list[TrainSample], list[np.ndarray], set[str]]:
    """An adapter, samples, their log-probabilities under it, and the names of what training changed."""
    maker = Maker(FAMILY)
    samples = [maker.sample() for _ in range(4)]
    trainer = Trainer(policy(FAMILY, full=full, lora=LORA), LEARNER, total_steps=10, device="cpu")
    try:
        base = stock(FAMILY)
        with torch.no_grad():
            for sample, values in zip(samples, trainer.model.log_probs(samples), strict=True):
                np.testing.assert_allclose(values, stock_log_probs(base, sample).numpy(), atol=1e-4)
        before = {name: p.detach().clone() for name, p in trainer.model.network.named_parameters()}
        losses = [trainer.update(samples, "sft")["policy/loss"] for _ in range(3)]
        assert losses == sorted(losses, reverse=True)
        assert np.isfinite(trainer.update(samples)["policy/grad_norm"])
        changed = {
            name for name, p in trainer.model.network.named_parameters() if not torch.equal(before[name], p)
        }
        return trainer.adapter(), samples, trainer.model.log_probs(samples), changed
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def adapted() -> tuple[Adapter, list[TrainSample], list[np.ndarray], set[str]]:
    return train(full=False)


def published(target: Path) -> Path:
    """The model folder with the layout of the published files, whose experts are transposed."""
    target.mkdir()
    for file in folder(FAMILY).iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder(FAMILY) / "model.safetensors")
    stacked = {name: t.transpose(1, 2).contiguous() for name, t in tensors.items() if ".experts." in name}
    assert stacked
    save_file(tensors | stacked, target / "model.safetensors", {"format": "pt"})
    return target


def test_adapters_are_on_attention_and_experts_stay_as_they_are(adapted) -> None:
    adapter, _, _, changed = adapted
    assert all(".self_attn." in name for name in adapter.tensors)
    assert all(".lora_" in name for name in changed)
    with pytest.raises(BadConfig, match="no layer 'down_proj'") as error:
        Architecture(str(folder(FAMILY))).shapes(["q_proj", "down_proj"])
    assert "q_proj" in str(error.value.fix)


@pytest.mark.parametrize("full", [False, True])
def test_an_export_has_the_published_layout_and_loads_in_transformers(
    full: bool, adapted, tmp_path: Path
) -> None:
    adapter, samples, expected, changed = train(full=True) if full else adapted
    if full:
        assert any(name.endswith("experts.gate_up_proj") for name in changed)
        assert any(name.endswith("mlp.gate.weight") for name in changed), (
            "the router learns without an auxiliary loss"
        )
    base = published(tmp_path / "base")
    write_merged_model(adapter, base, tmp_path / "merged")
    shapes = [
        {n: t.shape for n, t in load_file(tmp_path / at / "model.safetensors").items()}
        for at in ("base", "merged")
    ]
    assert shapes[0] == shapes[1]
    merged = load_model(policy(FAMILY), "cpu", folder=tmp_path / "merged")[0]
    with torch.no_grad():
        for sample, values in zip(samples, expected, strict=True):
            np.testing.assert_allclose(stock_log_probs(merged, sample).numpy(), values, atol=1e-4)


def test_rollouts_of_the_embedded_engine_have_the_learners_log_probs(adapted) -> None:
    adapter = adapted[0]
    settings = policy(FAMILY, lora=LORA)

    async def play(engine: HfEngine, number: int) -> TrainSample:
        session, maker = await engine.open(), Maker(FAMILY, seed=number)
        view = maker.view()
        new = maker.text(3 + number) + maker.image(view) + maker.text(2)
        said = await session.generate(new, [view], SamplingParams(0.7, 1.0, 5, seed=number))
        session.close()
        mask = np.asarray([False] * len(new) + [True] * len(said.tokens))
        log_probs = np.asarray([0.0] * len(new) + said.log_probs, np.float32)
        return TrainSample(np.asarray([*new, *said.tokens]), mask, log_probs, 0.0, [view])

    async def body() -> list[TrainSample]:
        engine = HfEngine(folder(FAMILY), settings, config.EngineConfig())
        try:
            await engine.load(1, adapter)
            return await asyncio.gather(*(play(engine, number) for number in range(3)))
        finally:
            await engine.aclose()

    samples = asyncio.run(body())
    trainer = Trainer(settings, LEARNER, total_steps=1, device="cpu", temperature=0.7, adapter=adapter)
    try:
        for sample, values in zip(samples, trainer.model.log_probs(samples), strict=True):
            np.testing.assert_allclose(values, sample.log_probs[sample.mask], atol=1e-4)
    finally:
        trainer.close()


def test_operations_are_those_of_the_active_experts() -> None:
    model = stock(FAMILY).train().requires_grad_(True)
    model.set_experts_implementation("eager")
    tokens = torch.tensor([Maker(FAMILY).text(40)])
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.float().logsumexp(
            -1
        ).sum().backward()
    products = sum(count for kind, count in counter.get_flop_counts()["Global"].items() if "mm" in str(kind))
    assert FlopCounter(model, spec(FAMILY).patch).count(40, 40, []) == products


def test_memory_is_estimated_and_vllm_is_refused_by_name(tmp_path: Path) -> None:
    arch = Architecture(str(folder(FAMILY)))
    assert arch.parameters == sum(p.numel() for p in stock(FAMILY).parameters())
    device, _ = estimate.learner_memory(arch, policy(FAMILY, lora=LORA, dtype="bfloat16"), LEARNER)
    assert device["weights"] == 2 * arch.parameters
    assert device["activations"] > 0
    with pytest.raises(BadConfig, match="qwen3_vl_moe"):
        link_model(folder(FAMILY), tmp_path / "linked", spec(FAMILY), 7840)
