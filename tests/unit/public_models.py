"""Configurations of the public models that the recipes are for: their sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, Qwen2_5_VLConfig, Qwen3VLConfig


def _qwen2_5_vl(tied: bool = False, vision_feedforward: int = 3420, **text: Any) -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        text_config={
            "max_position_embeddings": 128000,
            "tie_word_embeddings": tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            **text,
        },
        vision_config={
            "depth": 32,
            "hidden_size": 1280,
            "num_heads": 16,
            "intermediate_size": vision_feedforward,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": text["hidden_size"],
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        tie_word_embeddings=tied,
    )


PUBLIC: dict[str, PretrainedConfig] = {
    "qwen2_5_vl_3b": _qwen2_5_vl(
        tied=True,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
    ),
    "qwen2_5_vl_7b": _qwen2_5_vl(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    ),
    "qwen2_5_vl_32b": _qwen2_5_vl(
        vision_feedforward=3456,
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
    ),
    "qwen3_vl_8b": Qwen3VLConfig(
        text_config={
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 27,
            "hidden_size": 1152,
            "num_heads": 16,
            "intermediate_size": 4304,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
            "num_position_embeddings": 2304,
        },
        tie_word_embeddings=False,
    ),
}
"""By the folder of their recipes."""


def save_configs(root: Path) -> dict[str, str]:
    """Write folders that hold nothing but a config.json; returns them by name."""
    for name, settings in PUBLIC.items():
        settings.save_pretrained(root / name)
    return {name: str(root / name) for name in PUBLIC}
