"""Qwen2.5-VL: coordinates in pixels of the view, windowed attention in the vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.families.family import CLIP_MEAN, CLIP_STD
from pixelis.families.qwen import QwenVL


class Qwen2_5VL(QwenVL):
    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
        values = super().tiny(tokenizer, size)
        blocks = list(range(size["vision_layers"]))
        values["vision_config"] |= {"window_size": 112, "fullatt_block_indexes": blocks}
        return values


FAMILY = Qwen2_5VL(
    architecture="Qwen2_5_VLForConditionalGeneration",
    vocab=152064,
    coordinates="pixels",
    image_mean=CLIP_MEAN,
    image_std=CLIP_STD,
    vllm_processors=("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
)
