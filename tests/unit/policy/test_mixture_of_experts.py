"""Mixtures of experts: parity with transformers, rollouts, exports in the published layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import check_log_probs, folder, policy, published, stock
from tiny_trainer import LEARNER, batch, trainer

from pixelis import config
from pixelis.errors import BadConfig
from pixelis.policy import estimate
from pixelis.policy.adapters import Adapter
from pixelis.policy.architecture import Architecture
from pixelis.policy.export import write_merged_model
from pixelis.policy.model import load_model
from pixelis.policy.samples import TrainSample

FAMILIES = ("qwen3_vl_moe", "qwen3_5_moe")
LORA = config.LoraConfig(rank=4, alpha=8, targets=["q_proj", "k_proj", "v_proj", "o_proj"])


Trained = tuple[Adapter, list[TrainSample], list[np.ndarray], set[str]]


def train(family: str, full: bool) -> Trained:
    """An adapter, samples, their log-probabilities under it, and the names of what training changed."""
    samples = batch(4, family)
    with trainer(family, policy=policy(family, full=full, lora=LORA)) as learner:
        check_log_probs(stock(family), samples, learner.model.log_probs(samples))
        parameters = dict(learner.model.network.named_parameters())
        before = {name: p.detach().clone() for name, p in parameters.items()}
        losses = [learner.update(samples, "sft")["policy/loss"] for _ in range(3)]
        assert losses == sorted(losses, reverse=True)
        assert np.isfinite(learner.update(samples)["policy/grad_norm"])
        changed = {name for name, p in parameters.items() if not torch.equal(before[name], p)}
        return learner.adapter(), samples, learner.model.log_probs(samples), changed


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def adapted(family: str) -> Trained:
    return train(family, full=False)


def test_adapters_are_on_attention_and_experts_stay_as_they_are(adapted, family: str) -> None:
    adapter, _, _, changed = adapted
    assert all(".self_attn." in name for name in adapter.tensors)
    assert all(".lora_" in name for name in changed)
    layers = Architecture(policy(family)).shapes(["all-linear"])
    assert not any(".experts." in name for name in layers)
    if family == "qwen3_vl_moe":
        with pytest.raises(BadConfig, match="no layer 'down_proj'") as error:
            Architecture(policy(family)).shapes(["q_proj", "down_proj"])
        assert "q_proj" in str(error.value.fix)


@pytest.mark.parametrize("full", [False, True])
def test_an_export_has_the_layout_of_its_base_and_loads_in_transformers(
    full: bool, adapted, family: str, tmp_path: Path
) -> None:
    adapter, samples, expected, changed = train(family, full=True) if full else adapted
    if full:
        assert any(name.endswith("experts.gate_up_proj") for name in changed)
        assert any(name.endswith("mlp.gate.weight") for name in changed), (
            "the router learns without an auxiliary loss"
        )
    base = published(family, tmp_path / "base")
    # Published with a head that predicts further tokens, which nothing trains
    unused = {"mtp.norm.weight": torch.zeros(64)}
    save_file(load_file(base / "model.safetensors") | unused, base / "model.safetensors", {"format": "pt"})
    for source in (base, folder(family)):
        merged_folder = tmp_path / f"merged-{source.name}"
        write_merged_model(adapter, source, merged_folder)
        shapes = [
            {n: t.shape for n, t in load_file(at / "model.safetensors").items()}
            for at in (source, merged_folder)
        ]
        assert shapes[0] == shapes[1]
        exported = load_model(policy(family), "cpu", folder=merged_folder)[0]
        check_log_probs(exported, samples, expected)


def test_memory_is_estimated(family: str) -> None:
    arch = Architecture(policy(family))
    assert arch.parameters == sum(p.numel() for p in stock(family).parameters())
    device, _ = estimate.learner_memory(arch, policy(family, lora=LORA, dtype="bfloat16"), LEARNER)
    assert device["weights"] == 2 * arch.parameters
    assert device["activations"] > 0
