"""The parts of transformers' model code that Pixelis uses, imported without the libraries that it would load.

With them a process starts two to three seconds later and is 140 MB larger (AMD EPYC): transformers loads scikit-learn and SciPy
when they are installed, for assisted decoding and the losses of object detectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import utils


@contextmanager
def _without_scikit_learn_and_scipy() -> Iterator[None]:
    """Let transformers find neither; what else this process imports later does."""
    names = ("is_sklearn_available", "is_scipy_available")
    found = {name: getattr(utils, name) for name in names}
    try:
        for name in names:
            setattr(utils, name, lambda: False)
        yield
    finally:
        for name, value in found.items():
            setattr(utils, name, value)


with _without_scikit_learn_and_scipy():
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLForConditionalGeneration,
    )

__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
]
