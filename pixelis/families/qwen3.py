"""Qwen3, models of text alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.families.qwen import Qwen, head_width, tiny_text


class Qwen3(Qwen):
    def model_class(self) -> Any:
        from pixelis.families.text_models import Qwen3Text

        return Qwen3Text

    def tiny(self, tokenizer: Any, size: Mapping[str, int]) -> tuple[Any, Any]:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(**tiny_text(tokenizer, size), head_dim=head_width(size))
        return Qwen3ForCausalLM, config


FAMILY = Qwen3(vocab=151936, reads_images=False, key_mapping={r"^model\.": "model.language_model."})
