"""Generation engines with one interface: `hf` (runs wherever torch runs), `vllm` (production), `vllm_server`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pixelis.engines.engine import Engine

if TYPE_CHECKING:
    from pathlib import Path

    from pixelis.config import Config

__all__ = ["Engine", "start_engine"]


def start_engine(config: Config, folder: str | Path, index: int = 0) -> Engine:
    """Start the engine of `engine.name` with the model in `folder`; blocks until it can serve.

    index: of the generator, which has random numbers and, of servers, an address of its own.
    """
    settings, seed = config.engine, config.run.seed + index
    if settings.name == "vllm":
        from pixelis.engines.vllm import VllmEngine

        return VllmEngine(folder, config.policy, settings, config.dialogue, seed)
    if settings.name == "vllm_server":
        from pixelis.engines.vllm_server import VllmServerEngine

        url = settings.urls[index]
        return VllmServerEngine(folder, config.policy, settings, config.dialogue, url, seed)
    from pixelis.engines.hf import HfEngine

    return HfEngine(folder, config.policy, settings, seed)
