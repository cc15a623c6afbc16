"""Log-probabilities of the tokens of an answer and of their alternatives, in OpenAI's format."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from pixelis.records import Trajectory, Turn
from pixelis.serve.agent import Agent


async def answer_log_probs(agent: Agent, content: str, trajectory: Trajectory) -> dict[str, Any] | None:
    """Those of an answer in the last turn of a sample; None if it does not spell it. Raises InfraFailure."""
    turn = next(turn for turn in reversed(trajectory.turns) if turn.is_policy)
    top = [token for place in turn.top_log_probs for token, _ in place]
    pieces, likely = await agent.router.pieces([turn.tokens, top])
    return spelled(content, trajectory.answer or "", turn, pieces, likely)


def spelled(
    content: str, own: str, turn: Turn, pieces: Sequence[bytes], top: Sequence[bytes]
) -> dict[str, Any] | None:
    """The tokens of a turn that spell ``content``, or its ``own`` answer, which may begin with it.

    ``pieces`` are the bytes of the turn's tokens, ``top`` of its ``top_log_probs`` in order. Log-probs are
    natural, under the distribution that the token was sampled from; the first and last token may include
    markup. None if the turn does not spell it.
    """
    answer, text = own.encode(), b"".join(pieces)
    tag = text.rfind(b"<answer>")
    start = text.find(answer, tag + len(b"<answer>")) if tag >= 0 else text.rfind(answer)
    # In another sample's spelling the elected answer may be longer or shorter than this sample's own.
    end = start + len(content.encode() if own.startswith(content) else answer)
    if start < 0 or not answer:
        return None
    rest = iter(top)
    likely = [
        [_token(next(rest), log_prob) for _, log_prob in place]
        for place in turn.top_log_probs or [[] for _ in turn.tokens]
    ]
    ends = itertools.accumulate(map(len, pieces))
    tokens = [
        {**_token(piece, log_prob), "top_logprobs": others}
        for piece, stop, log_prob, others in zip(pieces, ends, turn.log_probs, likely, strict=True)
        if stop > start and stop - len(piece) < end
    ]
    return {"content": tokens, "refusal": None}


def _token(piece: bytes, log_prob: float) -> dict[str, Any]:
    return {"token": piece.decode(errors="replace"), "bytes": list(piece), "logprob": log_prob}
