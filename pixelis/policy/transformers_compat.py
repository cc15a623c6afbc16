"""transformers' classes that Pixelis uses, imported without libraries that it does not need.

transformers imports scikit-learn and SciPy, if installed, for assisted decoding and the losses of object detectors: two to three
seconds of a process's start and 140 MB of its memory (AMD EPYC). It imports torch's compiler, to mark functions for it, and
distributed tensors, to load parts of a model: another 0.9 s of an engine's start. Pixelis compiles no model, and DeepSpeed and
vLLM divide models themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import utils
from transformers.utils import import_utils

COMPILER = "torch._dynamo"
MISSING = ("is_sklearn_available", "is_scipy_available", "is_torch_distributed_available")
"""Functions of transformers that say no while it is imported."""


@contextmanager
def _without_other_libraries() -> Iterator[None]:
    """Make transformers believe that they are missing."""
    originals = {(module, name): getattr(module, name) for module in (utils, import_utils) for name in MISSING}
    try:
        for module, name in originals:
            setattr(module, name, lambda: False)
        yield
    finally:
        for (module, name), value in originals.items():
            setattr(module, name, value)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Do not load torch's compiler to mark functions for it; they stay as they are. Has no effect if it is loaded already."""
    if COMPILER in sys.modules:
        yield
        return

    def mark(function: Callable | None = None, *_: Any, **__: Any) -> Callable:
        return function or mark

    module = ModuleType(COMPILER)
    module.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]  # transformers imports another part of it
    for name in ("disable", "allow_in_graph", "assume_constant_result"):
        setattr(module, name, mark)
    sys.modules[COMPILER] = torch._dynamo = module
    try:
        yield
    finally:
        del sys.modules[COMPILER], torch._dynamo


with _without_other_libraries(), without_compiler():
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
    "without_compiler",
]
