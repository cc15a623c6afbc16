"""Adapters: where they sit, what merging computes, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft.tuners import lora
from tiny_policy import (
    FAMILIES,
    LORA,
    Maker,
    adapter_state,
    folder,
    merged,
    random_adapter,
    set_adapter_state,
    stock,
    stock_log_probs,
)

from pixelis import config
from pixelis.errors import BadConfig, BadInput, MissingFile
from pixelis.policy.adapters import Adapter, is_vision, load_adapter, save_adapter
from pixelis.policy.checkpoint import link_best
from pixelis.policy.lora import BaseWeights, adapted_layers, add_lora, merge_into
from pixelis.policy.lora_linear import LoraLinear
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint, resolve


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_language_model_is_adapted_and_trained(family: str):
    model = add_lora(stock(family), LORA)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    # layers x (A, B) x targets; Qwen3.5's first layer has five projections and three of its MLP, of Gemma's four
    # layers the upper two share keys and values.
    assert len(trained) == 2 * {"qwen3_5": 8 + 7, "gemma4": 4 * 9 - 2 * 2 + 1}.get(family, 2 * 7)
    assert all(".language_model." in name and ".lora_" in name for name in trained)
    # Qwen2.5-VL's vision tower has layers called gate_proj, up_proj and down_proj too.
    assert not any("lora" in name and is_vision(name) for name, _ in model.named_modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_vision_tower_is_adapted_on_request(family: str):
    modules = stock(family).named_modules()
    linear = {name for name, m in modules if isinstance(m, torch.nn.Linear) and is_vision(name)}
    layers = adapted_layers(stock(family), LORA.targets, True)
    assert {name for name in layers if is_vision(name)} == linear != set()
    assert layers.keys() - linear == adapted_layers(stock(family), LORA.targets).keys()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [{"vision_tower": True}, {"targets": ["q_proj", "lm_head"]}])
def test_adapters_outside_the_layers_compute_merged_what_they_compute_in_training(
    family: str, settings: dict[str, object]
):
    lora, sample = LORA.model_copy(update=settings), Maker(family).sample()
    if family == "gemma4" and "targets" in settings:
        with pytest.raises(BadConfig, match="tied to its embedding"):
            add_lora(stock(family), lora)
        return
    trained = add_lora(stock(family), lora, seed=1)
    state = {n: a if n.endswith(".A") else a + 0.05 for n, a in adapter_state(trained).items()}
    assert any(n.startswith("lm_head") or is_vision(n) for n in state)
    set_adapter_state(trained, state)
    own = merged(Adapter(state, lora.alpha, lora.rank, ""), family)
    with torch.no_grad():
        expected, bare = (stock_log_probs(model, sample) for model in (trained, stock(family)))
        assert (expected - stock_log_probs(own, sample)).abs().max() < 1e-4 < (expected - bare).abs().max()


def test_an_unknown_target_names_the_choices():
    with pytest.raises(BadConfig, match="did you mean q_proj"):
        add_lora(stock(), config.LoraConfig(targets=["qproj"]))


def test_a_fresh_adapter_changes_nothing_and_its_seed_decides_a():
    sample = Maker().sample()
    with torch.no_grad():
        before = stock_log_probs(stock(), sample)
        model = add_lora(stock(), LORA, seed=5)
        assert torch.allclose(before, stock_log_probs(model, sample), atol=1e-5)
    a, b, c = (adapter_state(add_lora(stock(), LORA, seed=s)) for s in (5, 5, 6))
    assert all(np.array_equal(a[k], b[k]) for k in a)
    assert any(not np.array_equal(a[k], c[k]) for k in a)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_compute_what_peft_computes(family: str):
    adapter, sample = random_adapter(family), Maker(family).sample()
    trained = add_lora(stock(family), LORA)
    set_adapter_state(trained, adapter.tensors)
    model, base = stock(family), BaseWeights()
    original = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for seed in (1, 2, 3):  # rounding errors must not add up over loads
            merge_into(model, base, random_adapter(family, seed))
        merge_into(model, base, adapter)
        difference = stock_log_probs(trained, sample) - stock_log_probs(model, sample)
        assert difference.abs().max() < 1e-4
    merge_into(model, base, None)
    assert all(torch.equal(v, original[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", ["q_proj", "down_proj"])  # with and without a bias
def test_an_adapted_layer_has_the_values_and_gradients_of_peft(target: str, dtype: torch.dtype):
    model = add_lora(stock("qwen2_5_vl").to(dtype), LORA)
    set_adapter_state(model, random_adapter("qwen2_5_vl").tensors)
    layer = next(m for n, m in model.named_modules() if n.endswith(target) and isinstance(m, LoraLinear))
    x = torch.randn(2, 9, layer.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)

    def run(
        forward: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        layer.base_layer.to(dtype)
        inputs = [
            x.to(dtype).requires_grad_(),
            layer.lora_A["default"].weight,
            layer.lora_B["default"].weight,
        ]
        out = forward(layer, inputs[0])
        slope = torch.linspace(-1, 1, out.numel()).view_as(out).to(dtype)
        return [out.detach(), *torch.autograd.grad(out, inputs, slope)]

    def divided(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        layer.base_layer.weight.ds_id = 0  # as ZeRO-3 marks it
        low: list[torch.dtype] = []
        hook = layer.lora_A["default"].register_forward_hook(lambda _, x, out: low.append(out.dtype))
        out = layer(x)
        hook.remove()
        del layer.base_layer.weight.ds_id
        assert low == [x.dtype], "the product is computed in the adapter's type"
        return out

    exact = run(lora.Linear.forward, torch.float32)
    peft = run(lora.Linear.forward, dtype)
    for own in (run(LoraLinear.forward, dtype), run(divided, dtype)):
        for actual, expected, true in zip(own, peft, exact, strict=True):
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
            assert (actual - true).norm() <= (1e-5 if dtype == torch.float32 else 0.01) * true.norm()


def test_full_parameters_are_published_the_same_way():
    model, base, other = stock(), BaseWeights(), stock()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    full = Adapter({n: p.detach().numpy().copy() for n, p in other.named_parameters()}, 1, 1, "", "full")
    merge_into(model, base, full)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    merge_into(model, base, None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock().parameters(), strict=True))


def test_an_adapter_is_saved_and_loaded_and_damage_is_detected(tmp_path: Path):
    adapter = random_adapter()
    save_adapter(adapter, tmp_path / "v1")
    loaded = load_adapter(tmp_path / "v1")
    assert loaded.sha256() == adapter.sha256()
    expected = (8, 4, fingerprint(folder("qwen3_vl")), "lora")
    assert (loaded.alpha, loaded.rank, loaded.base_sha256, loaded.kind) == expected
    assert dataclasses.replace(adapter, alpha=9).sha256() != adapter.sha256()
    path = tmp_path / "v1" / "adapter.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadInput, match="damaged"):
        load_adapter(tmp_path / "v1")
    with pytest.raises(MissingFile, match="no adapter"):
        load_adapter(tmp_path)


def test_a_run_stands_for_its_best_checkpoint_or_else_its_newest(tmp_path: Path):
    for step in (1, 2):
        save_adapter(random_adapter(seed=step), tmp_path / "checkpoints" / f"step_{step:08d}")
    assert load_adapter(tmp_path).sha256() == random_adapter(seed=2).sha256()
    link_best(tmp_path, 1)
    assert load_adapter(tmp_path).sha256() == random_adapter(seed=1).sha256()


def test_a_missing_model_raises_an_error_with_a_fix(tmp_path: Path):
    with pytest.raises(MissingFile, match=r"set policy\.model"):
        resolve(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(BadConfig, match="a model of type llama"):
        load_model(config.PolicyConfig(model=str(tmp_path)), "cpu")
    assert fingerprint(folder("qwen3_vl")) != fingerprint(folder("qwen2_5_vl"))
