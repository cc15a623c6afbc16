"""A base in 4 bit: learner and engine compute with the same one, adapters learn beside it, exports are 16 bit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_policy import (
    FAMILIES,
    LORA,
    Maker,
    check_log_probs,
    folder,
    merged,
    policy,
    random_adapter,
)
from tiny_trainer import batch, learner_with, trainer
from two_workers import CASES, launch, metrics, samples_of

from pixelis import config
from pixelis.dialogue.session import SamplingParams
from pixelis.engines.hf import HfEngine
from pixelis.errors import BadConfig, BadInput, MissingDependency
from pixelis.jobs import export
from pixelis.policy import architecture, estimate, quantization
from pixelis.policy.adapters import Adapter, load_adapter
from pixelis.policy.lora import BaseWeights, merge_into
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint
from pixelis.policy.samples import TrainSample

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="requires bitsandbytes: make test-vllm"),
]

NF4 = policy(quantization="nf4")


def generated(settings: config.PolicyConfig, family: str, adapter: Adapter | None) -> list[TrainSample]:
    """Sampled episodes of one turn with a picture, with the engine's log-probabilities."""

    async def run() -> list[TrainSample]:
        engine = HfEngine(folder(family), settings, config.EngineConfig())
        await engine.load(1, random_adapter(family, seed=9))  # is replaced without a trace
        await engine.load(2, adapter)
        maker, samples = Maker(family), []
        for seed in range(3):
            view = maker.view()
            prompt = maker.text(3) + maker.image(view) + maker.text(4)
            session = await engine.open()
            turn = await session.generate(prompt, [view], SamplingParams(max_tokens=12, seed=seed))
            mask = np.asarray([False] * len(prompt) + [True] * len(turn.tokens))
            log_probs = np.zeros(len(mask), np.float32)
            log_probs[mask] = turn.log_probs
            samples.append(TrainSample(np.asarray(prompt + turn.tokens), mask, log_probs, 1.0, [view]))
        await engine.aclose()
        return samples

    return asyncio.run(run())


def difference(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(values) - np.concatenate(others)).max())


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.long] if f != "qwen3_vl" else []) for f in FAMILIES]
)
def test_the_engine_computes_with_the_learners_4_bit_base(family: str) -> None:
    settings = policy(family, quantization="nf4")
    for adapter in (None, random_adapter(family)):
        samples = generated(settings, family, adapter)
        recorded = [s.log_probs[s.mask] for s in samples]
        with trainer(family, policy=settings, adapter=adapter) as learner:
            assert difference(learner.model.log_probs(samples), recorded) < 1e-5
            assert learner.model.behaviour_kl(samples) < 1e-8
        with trainer(family, adapter=adapter) as exact:
            assert difference(exact.model.log_probs(samples), recorded) > 1e-3


@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.3, marks=pytest.mark.long)])
def test_gradients_are_those_of_a_base_with_the_dequantised_weights(dropout: float) -> None:
    lora, samples = LORA.model_copy(update={"dropout": dropout}), batch(3)
    settings = {"learner": learner_with(rows=1), "adapter": random_adapter(), "seed": 5}
    with trainer(policy=policy(quantization="nf4", lora=lora), **settings) as learner:
        network = learner.model.network
        weights = {
            name.replace(".base_layer", "") + ".weight": quantization.dense(layer.weight, layer.quant_state)
            for name, layer in quantization.quantized_layers(network).items()
        }
        assert len(weights) == 2 * 7
        torch.manual_seed(0)
        learner.update(samples)
        moments = learner.model.zero.moments()
    with trainer(policy=policy(lora=lora), **settings) as dense:
        parameters = dict(dense.model.network.named_parameters())
        with torch.no_grad():
            for name, value in weights.items():
                parameters[name.replace(".weight", ".base_layer.weight")].copy_(value)
        torch.manual_seed(0)
        dense.update(samples)
        for name, expected in dense.model.zero.moments().items():
            assert np.linalg.norm(moments[name] - expected) <= 1e-4 * np.linalg.norm(expected), name


def test_a_4_bit_policy_learns_resumes_and_is_exported_in_its_base_models_type(tmp_path: Path) -> None:
    samples = batch(4)
    settings = {"policy": NF4, "learner": learner_with(zero_stage=2)}
    with trainer(**settings) as learner:
        losses = [learner.update(samples, "sft")["policy/loss"] for _ in range(5)]
        saved = learner.save(tmp_path / "checkpoints")
        losses += [learner.update(samples, "sft")["policy/loss"] for _ in range(3)]
        final = learner.adapter()
    assert losses[-1] < 0.9 * losses[0]
    with trainer(**settings, seed=99) as resumed:
        resumed.restore(saved)
        for _ in range(3):
            resumed.update(samples, "sft")
        assert all(np.abs(a - final.tensors[n]).max() < 1e-6 for n, a in resumed.adapter().tensors.items())
    export.export(saved, tmp_path / "merged", merge=True, model=str(folder("qwen3_vl")))
    with trainer(policy=policy(model=str(tmp_path / "merged"))) as whole:
        expected = whole.model.log_probs(samples)
    check_log_probs(merged(load_adapter(saved)), samples, expected)


def test_the_estimate_counts_the_bytes_of_a_4_bit_model() -> None:
    wide = policy(quantization="nf4", dtype="bfloat16")
    arch = architecture.Architecture(wide, torch.bfloat16)
    model = load_model(wide, "cpu")[0]
    merge_into(model, BaseWeights(), random_adapter())
    layers = quantization.quantized_layers(model).values()
    scales = [
        scale for layer in layers for scale in (layer.quant_state.absmax, layer.quant_state.state2.absmax)
    ]
    real = sum(t.nbytes for t in (*model.parameters(), *scales))
    device, _ = estimate.learner_memory(arch, wide, learner_with())
    assert device["weights"] == pytest.approx(real, rel=0.01)
    saved = arch.parameters * 2 - real
    assert saved == pytest.approx(1.484 * sum(arch.linear_weights.values()), rel=0.02)
    parts = estimate.generator_memory(arch, wide, config.EngineConfig())
    assert parts["weights"] == device["weights"]
    adapters = sum(buffer.nbytes for layer in layers for buffer in (layer.lora_a, layer.lora_b))
    assert (parts["originals"], parts["adapters"]) == (0, adapters)


def test_what_cannot_be_combined_with_a_4_bit_base_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for keys, words in (
        (["policy.full=true"], "freezes a whole base"),
        (["learner.zero_stage=3"], "freezes a whole base"),
        (["engine.name=vllm", "rft.loss.importance=none"], "set rft.loss.importance=truncate"),
    ):
        with pytest.raises(BadConfig, match=words):
            config.load(None, ["policy.quantization=nf4", *keys])
    config.load(None, ["policy.quantization=nf4", "engine.name=vllm"])
    weights = {"lm_head.weight": np.zeros((1, 1), np.float32)}
    whole = Adapter(weights, 1, 1, fingerprint(folder("qwen3_vl")), "full")
    with pytest.raises(BadInput, match="4-bit base"):
        merge_into(load_model(NF4, "cpu")[0], BaseWeights(), whole)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingDependency, match="bitsandbytes"):
        quantization.loading_options(NF4, torch.float32, torch.device("cpu"))


@pytest.mark.long
def test_two_workers_take_the_step_of_one_on_a_4_bit_base(tmp_path: Path) -> None:
    launch("two_workers.py", 2, tmp_path, "nf4")
    for name, steps in metrics(tmp_path).items():
        alone = CASES[name].trainer(stage=0)
        expected = CASES[name].run(alone, samples_of(CASES[name].family))
        alone.close()
        for step, one in zip(steps, expected, strict=True):
            names = ("policy/loss", "policy/drift", "policy/grad_norm")
            assert [step[n] for n in names] == pytest.approx([one[n] for n in names], abs=1e-5, rel=1e-4)
