"""Log-probabilities of the answers of samples."""

from __future__ import annotations

from collections.abc import Sequence

from pixelis.protocol.log_probs import LogProbs, last_turn
from pixelis.records import Trajectory
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import Answer


async def answer_log_probs(
    agent: Agent, answer: Answer, choices: Sequence[tuple[str | None, Trajectory]]
) -> list[LogProbs | None]:
    """Those of the ``choices`` of an ``answer``, each with its sample; None if it does not spell it.

    Raises InfraFailure.
    """
    elected = any(v.elected and v.id == answer.winner.id for v in answer.verdict.votes)
    foreign = None if elected else answer.winner  # neighbours alone elected its answer
    turns = [last_turn(t) if t.answer and t is not foreign else None for _, t in choices]
    spelled = [turn.tokens if turn is not None else [] for turn in turns]
    top = [
        [token for place in turn.top_log_probs for token, _ in place] if turn is not None else []
        for turn in turns
    ]
    pieces = await agent.router.pieces(spelled + top)
    rows = zip(choices, pieces[: len(turns)], pieces[len(turns) :], strict=True)
    return [
        LogProbs.of(trajectory, content, of_turn, of_top) if content is not None and of_turn else None
        for (content, trajectory), of_turn, of_top in rows
    ]
