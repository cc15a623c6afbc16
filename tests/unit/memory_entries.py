"""Experiences for the tests of memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from pixelis.memory import Entry, Shard
from pixelis.memory.rows import Place, experience
from pixelis.records import Experience, Question, Trajectory, Turn, Verdict, Vote

PNG = b"\x89PNG\r\n\x1a\n"
Opened = Callable[..., Shard]
"""The fixture ``opened``."""


def made(number: int, **values: object) -> Experience:
    """Experience ``e<number>``, made ``number`` seconds after the epoch unless ``created_at`` differs."""
    said = Turn(role="assistant", text="7", tokens=[4], log_probs=[-0.5])
    turns = [Turn(role="user", text="which?", tokens=[1, 2, 3]), said]
    votes = [Vote(answer="7", id="traj_0")]
    fields = {
        "id": f"e{number}",
        "question": Question(id=f"q{number}", question="Which digit?"),
        "trajectory": Trajectory(question_id=f"q{number}", turns=turns, answer="7"),
        "verdict": Verdict(answer="7", confidence=0.75, strategy="majority", votes=votes),
        "policy_version": 3,
        "created_at": float(number),
    }
    return Experience(**{**fields, **values})  # type: ignore[arg-type]


def listed(shard: Shard, limit: int, after: Place | None = None, user: str | None = None) -> list[Experience]:
    return [experience(row) for _, row in shard.list_rows(limit, after, user)]


def vectors(count: int, width: int = 16, seed: int = 0) -> np.ndarray:
    """Float32 [count, width] near a few directions, as embeddings are."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((8, width))
    return (centres[rng.integers(0, 8, count)] + 0.5 * rng.standard_normal((count, width))).astype(np.float32)


def entries(count: int, width: int = 16, first: int = 0, seed: int = 0) -> list[Entry]:
    return [Entry(made(first + i), v) for i, v in enumerate(vectors(count, width, seed))]


def wait_for(what: Callable[[], object], timeout_s: float = 60.0) -> None:
    started = time.monotonic()
    while not what():
        assert time.monotonic() - started < timeout_s
        time.sleep(0.005)
