"""Qwen2-VL: coordinates of 0 to 1000, full attention in the vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.families.family import CLIP_MEAN, CLIP_STD
from pixelis.families.qwen import QwenVL


class Qwen2VL(QwenVL):
    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
        values = super().tiny(tokenizer, size)
        vision = values["vision_config"]
        vision["mlp_ratio"] = vision.pop("intermediate_size") // vision["hidden_size"]
        # Here the width of the blocks is `embed_dim`, and `hidden_size` that of the output.
        vision |= {"embed_dim": vision["hidden_size"], "hidden_size": vision.pop("out_hidden_size")}
        return values


FAMILY = Qwen2VL(
    architecture="Qwen2VLForConditionalGeneration",
    vocab=152064,
    image_mean=CLIP_MEAN,
    image_std=CLIP_STD,
    vllm_processors=("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
)
