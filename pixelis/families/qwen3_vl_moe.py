"""The mixture of experts of Qwen3-VL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.families.quick_imports import quick_imports
from pixelis.families.qwen import QwenVL
from pixelis.families.qwen3_vl import tiny_qwen3_vl


class Qwen3VLMoe(QwenVL):
    def model_class(self) -> Any:
        with quick_imports():
            from transformers import Qwen3VLMoeForConditionalGeneration

        return Qwen3VLMoeForConditionalGeneration

    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> tuple[Any, Any]:
        from transformers import Qwen3VLMoeConfig

        values = tiny_qwen3_vl(tokenizer, size)
        values["text_config"] |= {
            "num_experts": size["experts"],
            "num_experts_per_tok": size["active_experts"],
            "moe_intermediate_size": size["feedforward"] // 2,
        }
        return self.model_class(), Qwen3VLMoeConfig(**values)


FAMILY = Qwen3VLMoe(
    vocab=151936,
    patch=16,
    vision_attention="Qwen3VLMoeVisionAttention",
    stacked={"experts.gate_up_proj": 2, "experts.down_proj": 1},
)
