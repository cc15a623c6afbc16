"""Qwen2-VL: the flat config.json that its folders have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pixelis.config import PolicyConfig
from pixelis.families.spec import load_spec, model_config
from pixelis.jobs import tiny_model
from pixelis.policy.architecture import Architecture


@pytest.mark.parametrize(
    ("hidden", "feedforward", "heads", "kv_heads", "parameters"),
    [(1536, 8960, 12, 2, 2.209e9), (3584, 18944, 28, 4, 8.291e9)],
    ids=["2b", "7b"],
)
def test_the_flat_configuration_of_a_published_folder_is_read(
    tmp_path: Path, hidden: int, feedforward: int, heads: int, kv_heads: int, parameters: float
) -> None:
    """parameters: as many as the model card states."""
    tied = kv_heads == 2
    config: dict[str, Any] = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        **{
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "image_token_id": 151655,
            "video_token_id": 151656,
        },
        **{"vision_start_token_id": 151652, "vision_end_token_id": 151653},
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936 if tied else 152064,
        "vision_config": {
            **{"depth": 32, "embed_dim": 1280, "hidden_size": hidden, "in_chans": 3, "mlp_ratio": 4},
            **{"num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14},
            "temporal_patch_size": 2,
        },
        "hidden_size": hidden,
        "intermediate_size": feedforward,
        "num_hidden_layers": 28,
        "num_attention_heads": heads,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = Architecture(PolicyConfig(model=str(tmp_path)))
    assert arch.parameters == pytest.approx(parameters, rel=0.002)
    assert (arch.model_type, arch.geometry.multiple) == ("qwen2_vl", 28)
    assert arch.vision_block_bytes(1024) > 0


def test_a_tiny_folder_is_like_a_real_one(tmp_path: Path) -> None:
    tiny_model.make(tmp_path / "tiny", "qwen2_vl")
    assert model_config(tmp_path / "tiny")["model_type"] == "qwen2_vl"
    spec = load_spec(tmp_path / "tiny")
    # Qwen2-VL reads and writes places as 0..1000, Qwen2.5-VL as pixels.
    assert (spec.family_name, spec.coordinates, spec.multiple) == ("qwen2_vl", "thousand", 28)
