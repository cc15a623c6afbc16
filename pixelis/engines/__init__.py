"""Generation engines behind one protocol: `hf` (embedded, runs wherever torch runs) and `vllm` (production)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from pixelis.config import Config
    from pixelis.dialogue.session import Session
    from pixelis.dialogue.spec import ModelSpec
    from pixelis.policy.adapters import Adapter


@runtime_checkable
class Engine(Protocol):
    """Writes turns for many sessions at once, all with one version of the policy."""

    version: int
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec

    async def open(self, prefix_key: str | None = None) -> Session:
        """A new session; waits while a `load` is pending.

        Sessions with equal keys promise equal first prompts (tokens and views), which are then read once for all of them.
        """
        ...

    async def load(self, version: int, adapter: Adapter | None) -> None:
        """Switch to another version (None: the bare model). Raises BadInput for a foreign adapter, and stays as it was.

        With `engine.on_update=drain` once no session is open; with `keep` between two turns (`hf`) or tokens (`vllm`) of
        open ones: they go on with the new weights over keys and values of the old, and log-probs are of what was sampled.
        """
        ...

    async def health(self) -> dict[str, object]:
        """Version, load and counters; answers while the engine is busy."""
        ...

    async def aclose(self) -> None:
        """Fail what is waiting and free the engine; may be called twice."""
        ...


def start_engine(config: Config, folder: str | Path, seed: int = 0) -> Engine:
    """The engine that `engine.name` asks for, with the model of `folder`; blocks until it can serve.

    Raises MissingDependency for vllm without vLLM, and what the engines raise.
    """
    if config.engine.name == "vllm":
        from pixelis.engines.vllm import VllmEngine

        return VllmEngine(folder, config.policy, config.engine, config.dialogue, seed)
    from pixelis.engines.hf import HfEngine

    return HfEngine(folder, config.policy, config.engine, seed)
