"""The experience memory: a shard with SQLite as the record of truth and a FAISS index derived from it.

No Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pixelis.memory.portable import Entry
    from pixelis.memory.shard import Shard

__all__ = ["Entry", "Shard"]

_MODULES = {"Entry": "portable", "Shard": "shard"}


def __getattr__(name: str) -> Any:
    # Every process that writes a checkpoint imports pixelis.files; Arrow and FAISS would add .4 s to its
    # start.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
