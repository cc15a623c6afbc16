"""Configurations of the public models that the recipes are for: their sizes."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
)

TEXT = "vocab_size", "hidden_size", "intermediate_size"
TEXT += "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
VISION = "depth", "hidden_size", "num_heads", "intermediate_size", "patch_size", "out_hidden_size"


def _qwen2_5_vl(*text: int, tied: bool = False, vision_feedforward: int = 3420) -> Qwen2_5_VLConfig:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    of_text = {"max_position_embeddings": 128000, "tie_word_embeddings": tied, "rope_parameters": rope}
    sizes = 32, 1280, 16, vision_feedforward, 14, text[1]
    of_vision = {"spatial_merge_size": 2, "temporal_patch_size": 2}
    of_vision |= {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
    return Qwen2_5_VLConfig(
        text_config=of_text | dict(zip(TEXT, text, strict=True)),
        vision_config=of_vision | dict(zip(VISION, sizes, strict=True)),
        tie_word_embeddings=tied,
    )


def _qwen3_vl(*text: int) -> Qwen3VLConfig:
    rope = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }
    of_text = {"head_dim": 128, "max_position_embeddings": 262144, "tie_word_embeddings": False}
    of_vision = {"spatial_merge_size": 2, "temporal_patch_size": 2}
    of_vision |= {"deepstack_visual_indexes": [8, 16, 24], "num_position_embeddings": 2304}
    return Qwen3VLConfig(
        text_config=of_text | {"rope_parameters": rope} | dict(zip(TEXT, text, strict=True)),
        vision_config=of_vision | dict(zip(VISION, (27, 1152, 16, 4304, 16, text[1]), strict=True)),
        tie_word_embeddings=False,
    )


def _qwen3_5(*text: int, value_heads: int = 32, tied: bool = False) -> Qwen3_5Config:
    of_text = {"linear_num_value_heads": value_heads, "max_position_embeddings": 262144}
    sizes = (24, 1024, 16, 4096, 16, text[1]) if tied else (27, 1152, 16, 4304, 16, text[1])
    return Qwen3_5Config(
        text_config=of_text | {"tie_word_embeddings": tied} | dict(zip(TEXT, text, strict=True)),
        vision_config=dict(zip(VISION, sizes, strict=True)),
        tie_word_embeddings=tied,
    )


PUBLIC: dict[str, PretrainedConfig] = {
    "qwen2_5_vl_3b": _qwen2_5_vl(151936, 2048, 11008, 36, 16, 2, tied=True),
    "qwen2_5_vl_7b": _qwen2_5_vl(152064, 3584, 18944, 28, 28, 4),
    "qwen2_5_vl_32b": _qwen2_5_vl(152064, 5120, 27648, 64, 40, 8, vision_feedforward=3456),
    "qwen3_vl_8b": _qwen3_vl(151936, 4096, 12288, 36, 32, 8),
    "qwen3_5_4b": _qwen3_5(248320, 2560, 9216, 32, 16, 4, tied=True),
    "qwen3_5_9b": _qwen3_5(248320, 4096, 12288, 32, 16, 4),
    "qwen3_5_27b": _qwen3_5(248320, 5120, 17408, 64, 24, 4, value_heads=48),
    "qwen3_5_35b_a3b": Qwen3_5MoeConfig(  # the defaults are its sizes
        text_config={"max_position_embeddings": 262144},
        vision_config={"out_hidden_size": 2048},
        tie_word_embeddings=False,
    ),
}
"""By the folder of their recipes."""


def save_configs(root: Path) -> dict[str, str]:
    """Write folders that hold nothing but a config.json; returns them by name."""
    for name, settings in PUBLIC.items():
        settings.save_pretrained(root / name)
    return {name: str(root / name) for name in PUBLIC}
