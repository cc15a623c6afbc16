"""The mixture of experts of Qwen3.5 and 3.6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.families.quick_imports import quick_imports
from pixelis.families.qwen3_5 import Qwen3_5, tiny_qwen3_5


class Qwen3_5Moe(Qwen3_5):
    def model_class(self) -> Any:
        with quick_imports():
            from transformers import Qwen3_5MoeForConditionalGeneration

        return Qwen3_5MoeForConditionalGeneration

    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> tuple[Any, Any]:
        from transformers import Qwen3_5MoeConfig

        values = tiny_qwen3_5(tokenizer, size)
        text = values["text_config"]
        half = text.pop("intermediate_size") // 2
        text |= {
            "num_experts": size["experts"],
            "num_experts_per_tok": size["active_experts"],
            "moe_intermediate_size": half,
            "shared_expert_intermediate_size": half,
        }
        return self.model_class(), Qwen3_5MoeConfig(**values)


FAMILY = Qwen3_5Moe(
    vocab=248320,
    patch=16,
    image_token=248056,
    video_token=248057,
    vision_attention="Qwen3_5MoeVisionAttention",
    vllm_processors=("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    stacked={"experts.gate_up_proj": 2, "experts.down_proj": 1},
)
