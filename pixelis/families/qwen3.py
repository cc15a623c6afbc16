"""Qwen3, models of text alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.families.family import Family
from pixelis.families.qwen import head_width, tiny_text


class Qwen3(Family):
    def model_class(self) -> Any:
        from pixelis.families.text_models import Qwen3Text

        return Qwen3Text

    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
        return tiny_text(tokenizer, size) | {"head_dim": head_width(size)}


FAMILY = Qwen3(
    architecture="Qwen3ForCausalLM",
    vocab=151936,
    reads_images=False,
    key_mapping={r"^model\.": "model.language_model."},
)
