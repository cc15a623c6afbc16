"""Models of text alone in the structure of the vision-language models."""

from __future__ import annotations

from typing import Any

from torch import nn

from pixelis.families.quick_imports import quick_imports

with quick_imports():
    from transformers import (
        Qwen2Config,
        Qwen2Model,
        Qwen2PreTrainedModel,
        Qwen3Config,
        Qwen3Model,
        Qwen3PreTrainedModel,
    )


class _TextModel:
    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012 (transformers' name)
    language: type[nn.Module]

    def __init__(self, config: Any):
        super().__init__(config)  # type: ignore[call-arg]
        self.model = nn.ModuleDict({"language_model": self.language(config)})
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def get_input_embeddings(self) -> Any:
        return self.model["language_model"].embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


class Qwen2Text(_TextModel, Qwen2PreTrainedModel):
    config_class = Qwen2Config
    language = Qwen2Model


class Qwen3Text(_TextModel, Qwen3PreTrainedModel):
    config_class = Qwen3Config
    language = Qwen3Model
