"""Imports of transformers without scikit-learn and SciPy, which add two to three seconds to each process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import utils


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import classes of transformers inside of it."""
    names = ("is_sklearn_available", "is_scipy_available")
    originals = {name: getattr(utils, name) for name in names}
    try:
        for name in names:
            setattr(utils, name, lambda: False)
        yield
    finally:
        for name, value in originals.items():
            setattr(utils, name, value)


with quick_imports():
    from transformers import AttentionInterface, AttentionMaskInterface

__all__ = ["AttentionInterface", "AttentionMaskInterface", "quick_imports"]
