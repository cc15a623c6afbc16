"""Qwen2.5-VL: coordinates in pixels of the view, windowed attention in the vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.families.family import CLIP_MEAN, CLIP_STD
from pixelis.families.quick_imports import quick_imports
from pixelis.families.qwen import QwenVL, tiny_vl


class Qwen2_5VL(QwenVL):
    def model_class(self) -> Any:
        with quick_imports():
            from transformers import Qwen2_5_VLForConditionalGeneration

        return Qwen2_5_VLForConditionalGeneration

    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> tuple[Any, Any]:
        from transformers import Qwen2_5_VLConfig

        values = tiny_vl(tokenizer, size)
        blocks = list(range(size["vision_layers"]))
        values["vision_config"] |= {"window_size": 112, "fullatt_block_indexes": blocks}
        return self.model_class(), Qwen2_5_VLConfig(**values)


FAMILY = Qwen2_5VL(
    vocab=152064,
    coordinates="pixels",
    image_mean=CLIP_MEAN,
    image_std=CLIP_STD,
    vision_attention="Qwen2_5_VLVisionAttention",
    vllm_processors=("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
)
