"""Generation engines with one protocol: `hf` (embedded, runs wherever torch runs) and `vllm` (production)."""

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
    """Generates turns for concurrent sessions with one version of the policy."""

    version: int
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec

    async def open(self, prefix_key: str | None = None) -> Session:
        """Open a session; waits while a `load` is pending.

        Sessions with equal keys must have equal first prompts (tokens and views), which are then prefilled once.
        """
        ...

    async def load(self, version: int, adapter: Adapter | None) -> None:
        """Switch to another version (None: the base model). Raises BadInput, without a switch, for an adapter of another model.

        `engine.on_update=drain` waits until no session is open. `keep` switches between two turns (`hf`) or tokens (`vllm`) of
        open sessions: they continue with the new weights and the old keys and values; log-probs are those at sampling time.
        """
        ...

    async def sleep(self) -> None:
        """Free the accelerator's memory, once no session is open. `open` and `load` wait for `wake`. Idempotent."""
        ...

    async def wake(self) -> None:
        """Continue with the weights from before `sleep`. Idempotent."""
        ...

    async def health(self) -> dict[str, object]:
        """Version, load and counters; available while the engine is busy."""
        ...

    async def aclose(self) -> None:
        """Fail pending requests and release the engine. Idempotent."""
        ...


def start_engine(config: Config, folder: str | Path, seed: int = 0) -> Engine:
    """Start the engine of `engine.name` with the model in `folder`; blocks until it can serve.

    Raises MissingDependency if vLLM is not installed, and the errors of the engines.
    """
    if config.engine.name == "vllm":
        from pixelis.engines.vllm import VllmEngine

        return VllmEngine(folder, config.policy, config.engine, config.dialogue, seed)
    from pixelis.engines.hf import HfEngine

    return HfEngine(folder, config.policy, config.engine, seed)
