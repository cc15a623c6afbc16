"""The architecture of pixelis-nano: tiny configurations of transformers classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from pixelis.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Family = Literal["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen2_vl", "qwen2", "qwen3"]

SIZES = {
    "hidden": 96,
    "layers": 3,
    "heads": 3,
    "kv_heads": 1,
    "feedforward": 240,
    "vision_hidden": 64,
    "vision_layers": 3,
    "vision_heads": 2,
    "vision_feedforward": 128,
    "experts": 4,
    "active_experts": 2,
    "patch": 8,
    "merge": 2,
    "view": 64,
    "positions": 4096,
}
"""Sizes of the packaged model: a 64 x 64 view has 16 image tokens."""


def build(
    tokenizer: PreTrainedTokenizerBase, family: Family = "qwen3_vl", seed: int = 0, **sizes: int
) -> PreTrainedModel:
    """A randomly initialised fp32 model on the CPU; ``sizes`` overrides entries of SIZES. Raises BadInput."""
    unknown = sorted(set(sizes) - set(SIZES))
    if unknown:
        raise BadInput(f"unknown size {unknown[0]!r}", fix=f"use {', '.join(SIZES)}")
    if family not in get_args(Family):
        raise BadInput(f"unknown family {family!r}", fix=f"use {', '.join(get_args(Family))}")
    size = {**SIZES, **sizes}
    kind, config = _configuration(tokenizer, family, size)
    torch.manual_seed(seed)
    model = kind._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        with torch.no_grad():
            model.model.visual.pos_embed.weight.copy_(
                _grid_waves(size["view"] // size["patch"], size["vision_hidden"])
            )
    model.config.pixelis_nano = True
    text = model.config.get_text_config()
    model.generation_config.eos_token_id = text.eos_token_id
    model.generation_config.pad_token_id = text.pad_token_id
    model.generation_config.do_sample = False
    return model


def _configuration(
    tokenizer: PreTrainedTokenizerBase, family: Family, size: Mapping[str, int]
) -> tuple[Any, Any]:
    import transformers

    text, vision = _text(tokenizer, size), _vision(size)
    half = size["hidden"] // size["heads"] // 2
    side = half // 3
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1000.0}
    if family in ("qwen2", "qwen3"):
        text |= {"tie_word_embeddings": False, "rope_parameters": rope}
        if family == "qwen2":
            return transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**text)
        return transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**text, head_dim=2 * half)
    rope |= {"mrope_section": [half - 2 * side, side, side]}
    if family == "qwen2_5_vl":
        kinds: tuple[Any, Any] = (
            transformers.Qwen2_5_VLForConditionalGeneration,
            transformers.Qwen2_5_VLConfig,
        )
        vision |= {"window_size": 112, "fullatt_block_indexes": list(range(size["vision_layers"]))}
    elif family == "qwen2_vl":
        kinds = (transformers.Qwen2VLForConditionalGeneration, transformers.Qwen2VLConfig)
        ratio = size["vision_feedforward"] // size["vision_hidden"]
        vision |= {"embed_dim": size["vision_hidden"], "hidden_size": size["hidden"], "mlp_ratio": ratio}
        del vision["intermediate_size"], vision["out_hidden_size"]
    else:
        kinds = (transformers.Qwen3VLForConditionalGeneration, transformers.Qwen3VLConfig)
        if family == "qwen3_vl_moe":
            kinds = (transformers.Qwen3VLMoeForConditionalGeneration, transformers.Qwen3VLMoeConfig)
            text |= {"num_experts": size["experts"], "num_experts_per_tok": size["active_experts"]}
            text |= {"moe_intermediate_size": size["feedforward"] // 2}
        grid = size["view"] // size["patch"]
        vision |= {"num_position_embeddings": grid * grid, "deepstack_visual_indexes": [0]}
        text |= {"head_dim": 2 * half}
        rope |= {"mrope_interleaved": True}
    if family in ("qwen2_vl", "qwen2_5_vl"):
        text |= {"tie_word_embeddings": False}
    text |= {"rope_parameters": rope}
    ids = tokenizer.convert_tokens_to_ids
    tokens = {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }
    # With tied embeddings vLLM's CPU build would keep a stale copy of lm_head after a weight update.
    return kinds[0], kinds[1](text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)


def _text(tokenizer: PreTrainedTokenizerBase, size: Mapping[str, int]) -> dict[str, Any]:
    ids = tokenizer.convert_tokens_to_ids
    return {
        "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
        "hidden_size": size["hidden"],
        "intermediate_size": size["feedforward"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "max_position_embeddings": size["positions"],
        "initializer_range": 0.06,
        "bos_token_id": None,
        "eos_token_id": ids("<|im_end|>"),
        "pad_token_id": ids("<|endoftext|>"),
    }


def _vision(size: Mapping[str, int]) -> dict[str, Any]:
    return {
        "depth": size["vision_layers"],
        "hidden_size": size["vision_hidden"],
        "intermediate_size": size["vision_feedforward"],
        "num_heads": size["vision_heads"],
        "patch_size": size["patch"],
        "spatial_merge_size": size["merge"],
        "temporal_patch_size": 2,
        "out_hidden_size": size["hidden"],
        "initializer_range": 0.06,
    }


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a checkpoint folder for `from_pretrained`: weights, tokenizer and image processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    vision, pixels = getattr(model.config, "vision_config", None), SIZES["view"] ** 2
    if vision is None:
        return
    Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        size={"shortest_edge": pixels, "longest_edge": pixels},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    ).save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)


def _grid_waves(side: int, width: int) -> Float[Tensor, "positions width"]:
    """Sines and cosines of row and column, to initialise the position table."""
    frequencies = torch.exp(torch.linspace(math.log(0.5), math.log(math.pi * side / 2), width // 4))
    angles = torch.linspace(-1, 1, side)[:, None] * frequencies
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows, columns = axis[:, None].expand(side, side, -1), axis[None].expand(side, side, -1)
    return torch.cat([rows, columns], dim=-1).reshape(side * side, width) * 0.5 * math.sqrt(2)
