"""Qwen2 and Qwen2.5, models of text alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.families.family import Family
from pixelis.families.qwen import tiny_text


class Qwen2(Family):
    def model_class(self) -> Any:
        from pixelis.families.text_models import Qwen2Text

        return Qwen2Text

    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> dict[str, Any]:
        return tiny_text(tokenizer, size)


FAMILY = Qwen2(
    architecture="Qwen2ForCausalLM",
    vocab=151936,
    reads_images=False,
    key_mapping={r"^model\.": "model.language_model."},
)
