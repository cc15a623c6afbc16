"""Log-probabilities of the tokens of an answer and of their alternatives, in OpenAI's format."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from pixelis.records import Trajectory, Turn


class TokenLogProb(BaseModel):
    """``logprob`` is natural, under the distribution that the answer's token was sampled from."""

    token: str
    bytes: list[int]
    logprob: float


class AnswerToken(TokenLogProb):
    """A token of an answer, and the most likely tokens in its place, best first."""

    top_logprobs: list[TokenLogProb] = Field(default_factory=list)


class LogProbs(BaseModel):
    """The tokens of an answer as the policy wrote it; the first and last may include markup."""

    content: list[AnswerToken]
    refusal: None = None

    @classmethod
    def of(
        cls, trajectory: Trajectory, content: str, pieces: Sequence[bytes], top: Sequence[bytes]
    ) -> LogProbs | None:
        """The tokens of the last policy turn that spell ``content``, or the answer that begins with it.

        ``pieces`` are the bytes of the turn's tokens, ``top`` of its ``top_log_probs`` in order.
        """
        turn = last_turn(trajectory)
        answer, text = (trajectory.answer or "").encode(), b"".join(pieces)
        tag = text.rfind(b"<answer>")
        start = text.find(answer, tag + len(b"<answer>")) if tag >= 0 else text.rfind(answer)
        # In another sample's spelling the elected answer may be longer or shorter than this sample's own.
        end = start + len(content.encode() if (trajectory.answer or "").startswith(content) else answer)
        if start < 0 or not answer:
            return None
        rest = iter(top)
        likely = [
            [TokenLogProb(**_fields(next(rest), log_prob)) for _, log_prob in place]
            for place in turn.top_log_probs or [[] for _ in turn.tokens]
        ]
        ends = list(itertools.accumulate(map(len, pieces)))
        tokens = [
            AnswerToken(**_fields(piece, log_prob), top_logprobs=others)
            for piece, stop, log_prob, others in zip(pieces, ends, turn.log_probs, likely, strict=True)
            if stop > start and stop - len(piece) < end
        ]
        return cls(content=tokens)


def last_turn(trajectory: Trajectory) -> Turn:
    return next(turn for turn in reversed(trajectory.turns) if turn.is_policy)


def _fields(piece: bytes, log_prob: float) -> dict[str, Any]:
    return {"token": piece.decode(errors="replace"), "bytes": list(piece), "logprob": log_prob}
