"""Qwen3-VL: coordinates of 0 to 1000, patches of 16 pixels, visual input of early decoder layers (DeepStack)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.families.quick_imports import quick_imports
from pixelis.families.qwen import QwenVL, head_width, tiny_vl


class Qwen3VL(QwenVL):
    def model_class(self) -> Any:
        with quick_imports():
            from transformers import Qwen3VLForConditionalGeneration

        return Qwen3VLForConditionalGeneration

    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> tuple[Any, Any]:
        from transformers import Qwen3VLConfig

        return self.model_class(), Qwen3VLConfig(**tiny_qwen3_vl(tokenizer, size))


def tiny_qwen3_vl(tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
    """A small configuration, also that of the dense layers of a mixture of experts."""
    values = tiny_vl(tokenizer, size)
    values["text_config"]["head_dim"] = head_width(size)
    values["text_config"]["rope_parameters"]["mrope_interleaved"] = True
    positions = (size["view"] // size["patch"]) ** 2
    values["vision_config"] |= {"num_position_embeddings": positions, "deepstack_visual_indexes": [0]}
    return values


FAMILY = Qwen3VL(
    vocab=151936,
    patch=16,
    vision_attention="Qwen3VLVisionAttention",
    vllm_processors=("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
)
