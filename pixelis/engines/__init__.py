"""Generation engines with one interface: `hf` (runs wherever torch runs) and `vllm` (production)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pixelis.engines.engine import Engine

if TYPE_CHECKING:
    from pathlib import Path

    from pixelis.config import Config

__all__ = ["Engine", "start_engine"]


def start_engine(config: Config, folder: str | Path, seed: int = 0) -> Engine:
    """Start the engine of `engine.name` with the model in `folder`; blocks until it can serve."""
    if config.engine.name == "vllm":
        from pixelis.engines.vllm import VllmEngine

        return VllmEngine(folder, config.policy, config.engine, config.dialogue, seed)
    from pixelis.engines.hf import HfEngine

    return HfEngine(folder, config.policy, config.engine, seed)
