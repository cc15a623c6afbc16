"""Qwen3.5 and 3.6: most layers are Gated DeltaNet, whose state restarts at each sample; vision without DeepStack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.families.qwen import head_width
from pixelis.families.qwen3_vl import Qwen3VL


class Qwen3_5(Qwen3VL):
    def attend_packed(self, model: Any) -> bool:
        """Attention layers always use `packed_attention`, as flash attention cannot share prompts."""
        from pixelis.families.attention import PACKED
        from pixelis.families.delta_net import mix_by_segments

        language_model = self.language(model)
        mix_by_segments(language_model)
        language_model.config._attn_implementation = PACKED
        return True

    def attend_cached(self, model: Any) -> None:
        from pixelis.families.delta_net import mix_by_segments

        super().attend_cached(model)
        mix_by_segments(self.language(model))

    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
        """Of each four layers the last is attention, and so is the model's last."""
        values = super().tiny(tokenizer, size)
        del values["vision_config"]["deepstack_visual_indexes"]
        width, last = head_width(size), size["layers"] - 1
        text = values["text_config"]
        # A quarter of each head is rotated.
        text["rope_parameters"] |= {
            "partial_rotary_factor": 0.25,
            "mrope_section": [width // 8 - 2 * (width // 24), width // 24, width // 24],
        }
        text |= {
            "layer_types": [
                "full_attention" if i % 4 == 3 or i == last else "linear_attention"
                for i in range(size["layers"])
            ],
            "linear_key_head_dim": width,
            "linear_value_head_dim": width,
            "linear_num_key_heads": size["kv_heads"],
            "linear_num_value_heads": size["heads"],
        }
        return values


FAMILY = Qwen3_5(
    architecture="Qwen3_5ForConditionalGeneration",
    vocab=248320,
    patch=16,
    image_token=248056,
    video_token=248057,
)
