"""The session protocol between the agent loop and a generation engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from pixelis.errors import BadInput
from pixelis.records import Trajectory, Turn

MIN_TEMPERATURE = 0.01
"""Lowest temperature above 0, as vLLM's: below it logits overflow."""
MAX_TOP_LOG_PROBS = 20
"""Most tokens reported beside a generated one, as OpenAI and vLLM have it."""
BATCH_PRIORITY = 10
"""Priority of requests that nobody waits for, behind those of callers."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of a session. BadInput for values out of range.

    ``temperature`` 0 is greedy. ``max_tokens`` limits one turn, the stop token included. ``seed`` determines
    the random numbers together with the first prompt and the version. A lower ``priority`` is scheduled
    first. ``stop``: text that ends a turn, whose last token completes it. ``given_log_probs``: of how many of the
    last given tokens the log-probabilities are wanted.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 32
    seed: int = 0
    priority: int = 0
    top_log_probs: int = 0
    stop: str = ""
    given_log_probs: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise BadInput(f"temperature {self.temperature} is not a finite number >= 0")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p {self.top_p} is outside (0, 1]")
        if self.max_tokens < 1:
            raise BadInput(f"max_tokens {self.max_tokens} must be at least 1")
        if not 0 <= self.top_log_probs <= MAX_TOP_LOG_PROBS:
            raise BadInput(f"top_log_probs {self.top_log_probs} is outside 0 to {MAX_TOP_LOG_PROBS}")


@dataclass(frozen=True)
class Start:
    """Where in an episode a session starts: its random numbers are those of a session for the whole episode.

    ``ordinal``: number of the episode in its group. ``turns``: those that the policy has taken. ``prompt`` and
    ``so_far``: numbers of tokens and views of the first prompt, and of all until the end of these turns.
    ``alone``: an outside agent's, so that the other episodes of its group come one by one.
    """

    ordinal: int = 0
    turns: int = 0
    prompt: tuple[int, int] = (0, 0)
    so_far: tuple[int, int] = (0, 0)
    alone: bool = False

    @classmethod
    def after(cls, trajectory: Trajectory, ordinal: int = 0) -> Start:
        """After the last turn of an outside agent's trajectory, which is the policy's."""

        def sizes(turns: Iterable[Turn]) -> tuple[int, int]:
            counts = [(len(turn.tokens), len(turn.images)) for turn in turns]
            return sum(tokens for tokens, _ in counts), sum(views for _, views in counts)

        prompt = itertools.takewhile(lambda turn: not turn.is_policy, trajectory.turns)
        return cls(ordinal, trajectory.policy_turns, sizes(prompt), sizes(trajectory.turns), True)


@dataclass(slots=True)
class Completion:
    """One generated turn, the stop token included.

    ``log_probs`` are natural, under the sampling distribution: banned ids masked, temperature and top_p applied
    (at temperature 0 the masked distribution at temperature 1). ``finish``: ``length`` at max_tokens.
    ``top_log_probs``: the most likely tokens at the place of each token, the most likely first.
    ``given_log_probs``: of the last given tokens, at temperature 1 (vLLM does not mask banned ids there).
    """

    tokens: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length"]
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    given_log_probs: list[float] = field(default_factory=list)


TokenCallback = Callable[[Sequence[int]], None]
"""Called in the event loop with the tokens of a turn as they are generated, each of them once."""


@runtime_checkable
class Session(Protocol):
    """One episode in an engine. Calls must not overlap."""

    async def generate(
        self,
        tokens: Sequence[int],
        views: Sequence[np.ndarray],
        sampling: SamplingParams,
        on_tokens: TokenCallback | None = None,
    ) -> Completion:
        """Append the new tokens (at first all until the end of the prompt), then generate one turn.

        ``views``: uint8 [h, w, 3], one per run of image pads. Raises BadInput if tokens and views disagree,
        InfraFailure if the engine fails. Cancelling the call closes the session.
        """
        ...

    def keep(self) -> None:
        """Let a later session that starts where this one is closed reuse what was computed, if possible."""
        ...

    def close(self) -> None:
        """Release the episode's memory. Idempotent."""
        ...
