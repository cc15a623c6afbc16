"""The mixture of experts of Qwen3.5 and 3.6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.families.qwen3_5 import Qwen3_5


class Qwen3_5Moe(Qwen3_5):
    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
        values = super().tiny(tokenizer, size)
        text = values["text_config"]
        half = text.pop("intermediate_size") // 2
        text |= {
            "num_experts": size["experts"],
            "num_experts_per_tok": size["active_experts"],
            "moe_intermediate_size": half,
            "shared_expert_intermediate_size": half,
        }
        return values


FAMILY = Qwen3_5Moe(
    architecture="Qwen3_5MoeForConditionalGeneration",
    vocab=248320,
    patch=16,
    image_token=248056,
    video_token=248057,
    stacked={"experts.gate_up_proj": 2, "experts.down_proj": 1},
)
