"""Starts an engine for a test module on its own event loop."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pixelis import config
from pixelis.engines import Engine
from pixelis.engines.vllm_files import link_model
from pixelis.families.family import ModelSpec
from pixelis.families.spec import load_spec

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


@contextmanager
def served(model: Path, log: Path, *flags: str, **environment: str) -> Iterator[str]:
    """The address of a server of a model; the route for token ids is on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    # `vllm serve` asks for the metadata of the package vllm, which the CPU build does not have
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", *flags]
    command += ["--enable-scale-out", "--host=127.0.0.1", f"--port={address.rpartition(':')[2]}"]
    command += ["--dtype=float32", "--enforce-eager", "--kv-cache-memory-bytes=1G"]
    settings = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    with log.open("w", encoding="utf-8") as file:
        env = os.environ | settings | environment
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        started = time.monotonic()
        while True:
            try:
                opener.open(f"{address}/health", timeout=5).close()
                break
            except OSError:
                text = log.read_text(encoding="utf-8")
                assert process.poll() is None, text[-3000:]
                assert time.monotonic() - started < 600, text[-3000:]
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def generating(
    model: Path, log: Path, dialogue: config.DialogueConfig, rank: int = 8
) -> AbstractContextManager[str]:
    """The address of a server that can be a generator."""
    flags = ["--enable-lora", "--max-loras=2", f"--max-lora-rank={rank}", "--block-size=32"]
    flags += ["--logprobs-mode=processed_logprobs", "--no-enable-chunked-prefill", "--max-logprobs=21"]
    flags += [f"--max-model-len={dialogue.max_context}", "--enable-prompt-tokens-details"]
    flags += ["--limit-mm-per-prompt", f'{{"image": {dialogue.max_images}, "video": 0}}']
    return served(model, log, *flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")


def start(
    name: str, folder: Path, policy: config.PolicyConfig, family: str, **values: Any
) -> Iterator[RunningEngine]:
    """Start an engine, yield it, stop it."""
    engine: Engine
    settings = config.EngineConfig(name=name, **values)  # type: ignore[arg-type]
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        if name == "hf":
            from pixelis.engines.hf import HfEngine

            engine = HfEngine(folder, policy, settings)
        elif name == "vllm_server":
            pytest.importorskip("vllm", reason="vLLM's CPU build is not installed (make test installs it)")
            from pixelis.engines.vllm_server import VllmServerEngine

            own = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = link_model(folder, own / "model", load_spec(folder), DIALOGUE.input.max_pixels)
            url = stack.enter_context(generating(model, own / "log", DIALOGUE))
            engine = VllmServerEngine(folder, policy, settings, DIALOGUE, url)
        else:
            pytest.importorskip("vllm", reason="vLLM's CPU build is not installed (make test installs it)")
            from pixelis.engines.vllm import VllmEngine

            engine = VllmEngine(folder, policy, settings, DIALOGUE)
        try:
            yield RunningEngine(engine, runner, family, folder, policy.lora.vision_tower)
        finally:
            runner.run(engine.aclose())
