"""Pixelis: train, serve and evolve vision-language models that reason with pixel operations."""

import importlib
from typing import Any

__version__ = "0.2.0"

# Loaded on use: a process that needs only the configuration or the records imports no torch and no Ray.
_HOMES = {
    "Agent": "pixelis.agent",
    "Answer": "pixelis.agent",
    "sft": "pixelis.jobs.functions",
    "rft": "pixelis.jobs.functions",
    "evaluate": "pixelis.jobs.functions",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
