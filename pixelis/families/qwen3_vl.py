"""Qwen3-VL: coordinates of 0 to 1000, patches of 16 pixels, visual input of early decoder layers (DeepStack)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.families.qwen import QwenVL, head_width


class Qwen3VL(QwenVL):
    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
        values = super().tiny(tokenizer, size)
        values["text_config"]["head_dim"] = head_width(size)
        values["text_config"]["rope_parameters"]["mrope_interleaved"] = True
        positions = (size["view"] // size["patch"]) ** 2
        values["vision_config"] |= {"num_position_embeddings": positions, "deepstack_visual_indexes": [0]}
        return values


FAMILY = Qwen3VL(architecture="Qwen3VLForConditionalGeneration", vocab=151936, patch=16)
