"""Pixel budgets and patches: inside the budget, equal to transformers' own processor."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import policy

from pixelis.errors import BadInput
from pixelis.families.vision import batch_windows, patchify
from pixelis.nano.architecture import build
from pixelis.nano.tokenizer import build_tokenizer
from pixelis.operations.pixel_budget import PixelBudget, fitted_size
from pixelis.policy.model import fuse_norms, load_model


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@given(
    st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([(16, 1, 8), (28, 4, 1280), (32, 256, 2048)])
)
def test_sizes_are_multiples_inside_the_budget(height, width, setting):
    multiple, low, high = setting
    budget = PixelBudget(low * multiple * multiple, high * multiple * multiple)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(BadInput):
            fitted_size(height, width, budget, multiple)
        return
    h, w = fitted_size(height, width, budget, multiple)
    assert h % multiple == 0
    assert w % multiple == 0
    assert h * w <= budget.max_pixels
    assert h * w >= budget.min_pixels


def test_sizes_agree_with_qwen_where_its_rounding_stays_inside():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    budget = PixelBudget(4 * 784, 1280 * 784)
    for height, width in [(56, 56), (480, 640), (700, 333), (28, 900), (1000, 1000)]:
        assert fitted_size(height, width, budget, 28) == smart_resize(
            height, width, 28, budget.min_pixels, budget.max_pixels
        )


@pytest.mark.parametrize("mean", [(0.5, 0.5, 0.5), (0.481, 0.457, 0.408)])
def test_patches_equal_the_processor_of_transformers(mean):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    std = (0.27, 0.26, 0.28)
    processor = Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, temporal_patch_size=2, image_mean=mean, image_std=std, do_resize=False
    )
    views = [noise(56, 84, 3, seed=1), noise(56, 84, 3, seed=2), noise(112, 28, 3, seed=3)]
    theirs = processor(views, return_tensors="pt")
    pixels, grid = patchify(views, 14, 2, 2, mean, std)
    assert torch.equal(grid, theirs["image_grid_thw"])
    assert torch.allclose(pixels, theirs["pixel_values"], atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(
    "sizes", [[(64, 64)] * 5, [(64, 64)], [(64, 64), (32, 64), (64, 64)], [(112, 176), (144, 80)]]
)
def test_batched_vision_attention_equals_the_stock_one(family, sizes):
    """Output and gradients; Qwen2.5-VL also with windows, those at the edges of a picture being smaller."""
    model = build(build_tokenizer(), family).eval()
    if family == "qwen2_5_vl":
        model.model.visual.fullatt_block_indexes, model.model.visual.window_size = [2], 48
    pixels, grid = patchify([noise(h, w, 3, seed=i) for i, (h, w) in enumerate(sizes)], 8, 2, 2)
    results = []
    for batched in (False, True):
        if batched:
            assert batch_windows(model) == 3
            assert batch_windows(model) == 3
        model.zero_grad(set_to_none=True)
        out = model.model.visual(pixels, grid_thw=grid).pooler_output
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append(
            (out.detach(), [p.grad for p in model.model.visual.parameters() if p.grad is not None])
        )
    (stock, stock_gradients), (ours, gradients) = results
    assert torch.allclose(stock, ours, atol=1e-6)
    for expected, gradient in zip(stock_gradients, gradients, strict=True):
        assert torch.allclose(expected, gradient, atol=1e-5 * max(1.0, float(expected.abs().max())))


def test_norms_of_the_gpu_equal_the_stock_ones():
    stock, fused = (build(build_tokenizer(), "qwen3_vl") for _ in range(2))
    fused.load_state_dict(stock.state_dict())
    norms = [m for m in fused.modules() if type(m).__name__.endswith("RMSNorm")]
    fuse_norms(fused)
    assert norms
    assert all(norm.forward.__func__ is norms[0].forward.__func__ for norm in norms)
    tokens = torch.arange(12).view(2, 6)
    results = []
    for model in (stock, fused):
        out = model(input_ids=tokens).logits
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for expected, value in zip(*results, strict=True):
        assert torch.allclose(expected, value, atol=1e-5 * max(1.0, float(expected.abs().max())))


def test_features_of_several_views_are_those_of_each_also_in_transformers_5_17(
    monkeypatch: pytest.MonkeyPatch,
):
    """That version returns the features of early layers undivided."""
    model, _, spec = load_model(policy("qwen3_vl"), "cpu")
    views = [noise(64, 64, 3, seed=1), noise(64, 64, 3, seed=2)]
    with torch.no_grad():
        single = [spec.family.encode_views(model, spec, [view])[0] for view in views]
        divided = model.model.get_image_features

        def undivided(*args: Any, **options: Any) -> Any:
            result = divided(*args, **options)
            result.deepstack_features = [torch.cat(tuple(layer)) for layer in result.deepstack_features]
            return result

        monkeypatch.setattr(model.model, "get_image_features", undivided)
        for own, expected in zip(spec.family.encode_views(model, spec, views), single, strict=True):
            assert torch.allclose(own.embeds, expected.embeds, atol=1e-5)
            assert own.deepstack
            for layer, other in zip(own.deepstack, expected.deepstack, strict=True):
                assert torch.allclose(layer, other, atol=1e-5)
