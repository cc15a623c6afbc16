"""The session protocol: what the agent loop asks of a generation engine, and the turn it gets back.

A session is one episode. It holds the keys and values of what was already read, so each call brings only what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from pixelis.errors import BadInput


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
