"""Generation engines behind one protocol: `hf` (embedded, runs wherever torch runs) and `vllm` (production).

A session is one episode. It holds the keys and values of what was already read, so each call brings only what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np

from pixelis.errors import BadInput

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from pixelis.config import Config
    from pixelis.dialogue.spec import ModelSpec
    from pixelis.policy.adapters import Adapter


@dataclass(frozen=True)
class SamplingParams:
    """How one session draws its tokens.

    temperature 0 is greedy; top_p keeps the smallest set of tokens with at least that probability; max_tokens counts the tokens
    of one `generate` call, the stop token included; seed: with the first prompt and the version it decides the session's stream
    of random numbers (sessions that share a prefix_key draw differently even with equal seeds). Raises BadInput for values
    outside their ranges.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise BadInput(f"temperature {self.temperature} is not a finite number >= 0")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p {self.top_p} is outside (0, 1]")
        if self.max_tokens < 1:
            raise BadInput(f"max_tokens {self.max_tokens}: an answer has at least one token")


def check_request(tokens: Sequence[int], views: Sequence[np.ndarray], vocab: int) -> None:
    """BadInput unless there are tokens, all of the vocabulary, and the views are pictures."""
    if not len(tokens):
        raise BadInput("no new tokens: the policy would speak twice in a row")
    if min(tokens) < 0 or max(tokens) >= vocab:
        raise BadInput(f"token {min(tokens) if min(tokens) < 0 else max(tokens)} is not in the vocabulary")
    for view in views:
        if view.ndim != 3 or view.shape[2] != 3 or view.dtype != np.uint8:
            raise BadInput(f"a view is uint8 [h, w, 3], not {view.dtype} {list(view.shape)}")


@dataclass(slots=True)
class Completion:
    """What the policy wrote in one turn.

    tokens: ids, the stop token included; log_probs: one natural logarithm per token, of the distribution that was sampled from
    (banned ids masked, temperature and top_p applied; at temperature 0 the masked distribution at temperature 1);
    finish: `stop` when the policy ended its turn, `length` when max_tokens did.
    """

    tokens: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length"]


@runtime_checkable
class Session(Protocol):
    """One episode inside an engine. Calls follow each other; they never overlap."""

    async def generate(self, tokens: Sequence[int], views: Sequence[np.ndarray], sampling: SamplingParams) -> Completion:
        """Read the tokens and views that are new since the last call (the whole prompt at first), then write one turn.

        tokens: ids with image pads expanded; views: uint8 [h, w, 3], one per run of image pads, in order. Raises BadInput for
        tokens and views that disagree, InfraFailure when the engine failed. Cancelling the call abandons the session.
        """
        ...

    def close(self) -> None:
        """Forget the episode and free its memory; may be called twice."""
        ...


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
