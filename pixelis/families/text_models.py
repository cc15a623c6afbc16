"""Models of text alone in the structure of the vision-language models, with an empty vision tower."""

from __future__ import annotations

from typing import Any

import torch
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


class _TextPositions:
    """Takes the M-RoPE positions of the learner and the engine, whose axes are equal without images."""

    def forward(self, *arguments: Any, position_ids: torch.Tensor | None = None, **others: Any) -> Any:
        if position_ids is not None and position_ids.dim() == 3:
            position_ids = position_ids[-1]
        return super().forward(*arguments, position_ids=position_ids, **others)  # type: ignore[misc]


class _Qwen2Language(_TextPositions, Qwen2Model):
    pass


class _Qwen3Language(_TextPositions, Qwen3Model):
    pass


class _Inner(nn.Module):
    """What the vision-language classes call `model`."""

    def __init__(self, language_model: nn.Module):
        super().__init__()
        self.language_model = language_model
        self.visual = nn.Module()


class _TextModel:
    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012 (transformers' name)
    language: type[nn.Module]

    def __init__(self, config: Any):
        super().__init__(config)  # type: ignore[call-arg]
        self.model = _Inner(self.language(config))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def get_input_embeddings(self) -> Any:
        return self.model.language_model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


class Qwen2Text(_TextModel, Qwen2PreTrainedModel):
    config_class = Qwen2Config
    language = _Qwen2Language


class Qwen3Text(_TextModel, Qwen3PreTrainedModel):
    config_class = Qwen3Config
    language = _Qwen3Language
