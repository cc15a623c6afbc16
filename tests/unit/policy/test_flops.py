"""Operations of a training step against those that torch counts, the share of a GPU's peak."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tiny_policy import FAMILIES, LORA, policy, spec, stock
from tiny_trainer import batch, learner_with, trainer
from torch.utils.flop_counter import FlopCounterMode

from pixelis.policy.flops import FlopCounter, peak_flops
from pixelis.policy.lora import add_lora


@pytest.mark.parametrize(
    ("family", "full"),
    [
        *itertools.product(FAMILIES, (False, True)),
        ("qwen3_vl_moe", True),
        ("qwen3_5_moe", True),
    ],
)
def test_matrix_products_of_a_step_are_those_that_torch_counts(family: str, full: bool) -> None:
    model = stock(family).train()
    if family.endswith("moe"):
        model.set_experts_implementation("eager")
    if full:
        model.requires_grad_(True)
    else:
        add_lora(model, LORA, 0)
    sample = batch(2, family)[1]
    tokens = torch.from_numpy(sample.tokens[sample.tokens != spec(family).image_token])[None]
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        logits.float().logsumexp(-1).sum().backward()
    counts = counter.get_flop_counts()["Global"].items()
    # Without the batched products of the delta rule, which depend on its chunks.
    products = sum(count for kind, count in counts if "mm" in str(kind) and "bmm" not in str(kind))
    flops, length = FlopCounter(model, spec(family).patch), tokens.shape[1]
    # With adapters the input of the first layer needs no gradient, and torch does not count products that are
    # added in place.
    layers = model.model.language_model.layers
    attention = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    states = [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]
    rule = sum(3 * 6 * m.num_v_heads * m.head_k_dim * m.head_v_dim * length for m in states)
    expected = products if full else pytest.approx(products, rel=0.12)
    assert flops.count(length, length, []) - rule == expected
    width = sum(layer.o_proj.in_features for layer in attention)
    assert flops.count(0, 0, [length]) == 3 * 4 * width * length**2


def test_a_step_reports_its_rate_and_its_share_of_the_peak() -> None:
    with trainer(policy=policy(full=True), learner=learner_with(peak_tflops=0.5)) as learner:
        metrics = learner.update(batch(), "sft")
        assert learner.flops.vision > 0
    assert 0 < metrics["learner/tflops_per_s"] < 10
    assert metrics["learner/mfu"] == pytest.approx(metrics["learner/tflops_per_s"] / 0.5)
    with trainer() as learner:
        assert "learner/mfu" not in learner.update(batch(), "sft")
        assert learner.flops.vision == 0


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("H100 80GB HBM3", 989), ("H100 PCIe", 756), ("A10", 125), ("L4", 121), ("L40S", 362)],
)
def test_the_peak_is_found_by_the_name_of_the_gpu(
    name: str, tflops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA {name}")
    assert peak_flops(torch.device("cuda")) == tflops * 1e12
    assert peak_flops(torch.device("cuda"), 5.0) == 5e12
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.slow
@pytest.mark.parametrize(("family", "full"), [("qwen3_vl", False), ("qwen2_5_vl", True)])
@pytest.mark.long
def test_training_in_bfloat16_follows_that_in_float32(family: str, full: bool) -> None:
    losses = {}
    for dtype in ("float32", "bfloat16"):
        learner = learner_with(lr=1e-3)
        with trainer(
            family, policy=policy(family, dtype=dtype, full=full), learner=learner, total_steps=20
        ) as trained:
            losses[dtype] = [trained.update(batch(family=family), "sft")["policy/loss"] for _ in range(20)]
    wide, narrow = np.asarray(losses["float32"]), np.asarray(losses["bfloat16"])
    assert wide[-1] < 0.95 * wide[0]
    assert np.abs(narrow / wide - 1).max() < 0.01
