"""The mixture of experts of Qwen3-VL."""

from __future__ import annotations

import math
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
            # vLLM's CPU build pads other sizes than multiples of 64, and cannot load weights again.
            "moe_intermediate_size": math.ceil(size["feedforward"] / 64) * 64,
            "norm_topk_prob": True,  # as published; vLLM reads it, transformers always does so
        }
        return self.model_class(), Qwen3VLMoeConfig(**values)


FAMILY = Qwen3VLMoe(
    vocab=151936,
    patch=16,
    vision_attention="Qwen3VLMoeVisionAttention",
    vllm_processors=("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    stacked={"experts.gate_up_proj": 2, "experts.down_proj": 1},
    published_transposed=True,
)
