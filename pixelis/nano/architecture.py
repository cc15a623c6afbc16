"""The architecture of pixelis-nano: tiny configurations of transformers classes, which load like the large models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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


def build(tokenizer: PreTrainedTokenizerBase, family: Family = "qwen3_vl", seed: int = 0, **sizes: int) -> PreTrainedModel:
    """Build a randomly initialised fp32 model on the CPU: Qwen3-VL (packaged), Qwen2.5-VL or Qwen2-VL, untied embeddings.

    `sizes` overrides entries of SIZES. Raises BadInput for an unknown family or size.
    """
    unknown = sorted(set(sizes) - set(SIZES))
    if unknown:
        raise BadInput(f"unknown size {unknown[0]!r}", fix=f"use {', '.join(SIZES)}")
    size = {**SIZES, **sizes}
    half = size["hidden"] // size["heads"] // 2
    side = half // 3
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [half - 2 * side, side, side]}
    ids = tokenizer.convert_tokens_to_ids
    tokens = {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }
    text: dict[str, Any] = {
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
    vision: dict[str, Any] = {
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
    # With tied embeddings vLLM's CPU build would keep a stale copy of lm_head after a weight update.
    torch.manual_seed(seed)
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        from transformers import (
            Qwen3VLConfig,
            Qwen3VLForConditionalGeneration,
            Qwen3VLMoeConfig,
            Qwen3VLMoeForConditionalGeneration,
        )

        classes: tuple[Any, Any] = (Qwen3VLConfig, Qwen3VLForConditionalGeneration)
        if family == "qwen3_vl_moe":
            classes = (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration)
            text |= {"num_experts": size["experts"], "num_experts_per_tok": size["active_experts"]}
            text |= {"moe_intermediate_size": size["feedforward"] // 2}
        grid = size["view"] // size["patch"]
        vision |= {"num_position_embeddings": grid * grid, "deepstack_visual_indexes": [0]}
        text |= {"head_dim": 2 * half, "rope_parameters": {**rope, "mrope_interleaved": True}}
        config = classes[0](text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
        model = classes[1]._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        with torch.no_grad():
            model.model.visual.pos_embed.weight.copy_(_grid_waves(grid, size["vision_hidden"]))
    elif family == "qwen2_5_vl":
        from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

        vision |= {"window_size": 112, "fullatt_block_indexes": list(range(size["vision_layers"]))}
        text |= {"tie_word_embeddings": False, "rope_parameters": rope}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    elif family == "qwen2_vl":
        from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

        ratio = size["vision_feedforward"] // size["vision_hidden"]
        vision |= {"embed_dim": size["vision_hidden"], "hidden_size": size["hidden"], "mlp_ratio": ratio}
        vision = {key: value for key, value in vision.items() if key not in ("intermediate_size", "out_hidden_size")}
        text |= {"tie_word_embeddings": False, "rope_parameters": rope}
        config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
        model = Qwen2VLForConditionalGeneration._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    elif family in ("qwen2", "qwen3"):
        from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

        text |= {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
        classes = (Qwen2Config, Qwen2ForCausalLM)
        if family == "qwen3":
            classes = (Qwen3Config, Qwen3ForCausalLM)
            text |= {"head_dim": 2 * half}
        model = classes[1]._from_config(classes[0](**text), attn_implementation="sdpa", dtype=torch.float32)
    else:
        raise BadInput(f"unknown family {family!r}", fix="use qwen3_vl, qwen3_vl_moe, qwen2_5_vl, qwen2_vl, qwen2 or qwen3")
    model.config.pixelis_nano = True
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = text["eos_token_id"], text["pad_token_id"]
    model.generation_config.do_sample = False
    return model


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
    """Sines and cosines of row and column, [side * side, width], to initialise the position table."""
    frequencies = torch.exp(torch.linspace(math.log(0.5), math.log(math.pi * side / 2), width // 4))
    angles = torch.linspace(-1, 1, side)[:, None] * frequencies
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows, columns = axis[:, None].expand(side, side, -1), axis[None].expand(side, side, -1)
    return torch.cat([rows, columns], dim=-1).reshape(side * side, width) * 0.5 * math.sqrt(2)
