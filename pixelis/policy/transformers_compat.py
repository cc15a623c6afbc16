"""transformers' classes without scikit-learn and SciPy, whose import adds two to three seconds to each process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import utils


@contextmanager
def _without_scikit_learn_and_scipy() -> Iterator[None]:
    names = ("is_sklearn_available", "is_scipy_available")
    originals = {name: getattr(utils, name) for name in names}
    try:
        for name in names:
            setattr(utils, name, lambda: False)
        yield
    finally:
        for name, value in originals.items():
            setattr(utils, name, value)


with _without_scikit_learn_and_scipy():
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2Config,
        Qwen2Model,
        Qwen2PreTrainedModel,
        Qwen2VLForConditionalGeneration,
        Qwen3Config,
        Qwen3Model,
        Qwen3PreTrainedModel,
        Qwen3VLForConditionalGeneration,
        Qwen3VLMoeForConditionalGeneration,
    )

__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "Qwen2Config",
    "Qwen2Model",
    "Qwen2PreTrainedModel",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3Config",
    "Qwen3Model",
    "Qwen3PreTrainedModel",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
]
