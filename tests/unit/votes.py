"""Samples with given answers and probabilities, and settings of a vote."""

from __future__ import annotations

import math
from typing import Any

from pixelis.config import EvolutionConfig
from pixelis.records import Media, Question, Trajectory, Turn

QUESTION = Question(
    id="q", question="Which digit?", media=[Media(id="img0", uri="data:image/png;base64,AAAA")]
)
NOW = 1_000_000.0
Answered = tuple[str | None, float]


def voting(strategy: str = "majority", **values: Any) -> EvolutionConfig:
    return EvolutionConfig(vote={"strategy": strategy, **values}, neighbours={"min_similarity": 0.9})


def sample(answered: Answered, i: int = 0) -> Trajectory:
    """A sample whose answer turn has this geometric mean probability."""
    answer, probability = answered
    log_prob = math.log(probability) if probability else -math.inf
    turns = [
        Turn(role="user", tokens=[1]),
        Turn(role="assistant", tokens=[2], log_probs=[-9.0]),  # a call: not the answer
        Turn(role="tool", tokens=[3]),
        Turn(role="assistant", tokens=[4, 5], log_probs=[log_prob, log_prob]),
    ]
    return Trajectory(id=f"t{i}", question_id="q", turns=turns, answer=answer)


def samples(*answered: Answered) -> list[Trajectory]:
    return [sample(pair, i) for i, pair in enumerate(answered)]
