"""Imports of transformers without scikit-learn and SciPy, which add two to three seconds to each process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import classes of transformers inside of it."""
    from transformers import utils

    names = ("is_sklearn_available", "is_scipy_available")
    originals = {name: getattr(utils, name) for name in names}
    try:
        for name in names:
            setattr(utils, name, lambda: False)
        yield
    finally:
        for name, value in originals.items():
            setattr(utils, name, value)
