"""The mixture of experts of Qwen3-VL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pixelis.families.qwen3_vl import Qwen3VL


class Qwen3VLMoe(Qwen3VL):
    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
        values = super().tiny(tokenizer, size)
        values["text_config"] |= {
            "num_experts": size["experts"],
            "num_experts_per_tok": size["active_experts"],
            # vLLM's CPU build pads other sizes than multiples of 64, and cannot load weights again.
            "moe_intermediate_size": math.ceil(size["feedforward"] / 64) * 64,
            "norm_topk_prob": True,  # as published; vLLM reads it, transformers always does so
        }
        return values


FAMILY = Qwen3VLMoe(
    architecture="Qwen3VLMoeForConditionalGeneration",
    vocab=151936,
    patch=16,
    stacked={"experts.gate_up_proj": 2, "experts.down_proj": 1},
    published_transposed=True,
)
