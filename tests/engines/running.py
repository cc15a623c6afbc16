"""Starts an engine for a test module on its own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pixelis import config
from pixelis.engines import Engine
from pixelis.families.family import ModelSpec

DIALOGUE = config.DialogueConfig(
    input=config.PixelRangeConfig(min_pixels=256, max_pixels=16384),
    crop=config.PixelRangeConfig(min_pixels=256, max_pixels=16384),
    max_context=512,
    max_images=8,
)


@dataclass
class RunningEngine:
    """An engine with its event loop."""

    engine: Any
    runner: asyncio.Runner
    family: str
    folder: Path
    tower: bool
    """Whether its adapters may be on the vision tower too."""

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    @property
    def swaps(self) -> bool:
        """Whether the engine applies adapters at runtime instead of merging them into the weights."""
        return not getattr(self.engine, "merges", True)

    def run(self, test: Awaitable[None]) -> None:
        """Run an async test, then close its sessions."""

        async def run_and_close() -> None:
            try:
                await asyncio.wait_for(test, 240)
            finally:
                for session in list(self.engine._sessions):
                    session.close()

        self.runner.run(run_and_close())


def start(
    name: str, folder: Path, policy: config.PolicyConfig, family: str, **values: Any
) -> Iterator[RunningEngine]:
    """Start an engine, yield it, stop it."""
    engine: Engine
    settings = config.EngineConfig(name=name, **values)  # type: ignore[arg-type]
    with asyncio.Runner() as runner:
        if name == "hf":
            from pixelis.engines.hf import HfEngine

            engine = HfEngine(folder, policy, settings)
        else:
            pytest.importorskip("vllm", reason="vLLM's CPU build is not installed (make test installs it)")
            from pixelis.engines.vllm import VllmEngine

            engine = VllmEngine(folder, policy, settings, DIALOGUE)
        try:
            yield RunningEngine(engine, runner, family, folder, policy.lora.vision_tower)
        finally:
            runner.run(engine.aclose())
