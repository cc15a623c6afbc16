"""Formulas that hang: nothing stalls, each call ends soon after its timeout (own rewards: tests/chaos,
F6).
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from scored_episodes import episode
from test_worker_pool import ENDLESS

from pixelis.config import RewardsConfig
from pixelis.records import Group, Question
from pixelis.rewards import worker_pool
from pixelis.rewards.grader import Grader

TIMEOUT_S = 4.0
SIZE = 8


def groups(kinds: list[str], scorer: str = "exact") -> list[Group]:
    out = []
    for number in range(len(kinds) // SIZE):
        part = kinds[number * SIZE : (number + 1) * SIZE]
        question = Question(id="q", question="?", answers=["fine"], scorer=scorer)
        trajectories = [episode(kind).model_copy(update={"group_id": f"g{number}"}) for kind in part]
        out.append(Group(id=f"g{number}", question=question, trajectories=trajectories))
    return out


@pytest.fixture
def longest(monkeypatch):
    """Seconds of the longest call of a started worker."""
    seconds = [0.0]
    exchange = worker_pool._Worker._exchange

    def timed(self, message, timeout_s):
        started = time.monotonic()
        try:
            return exchange(self, message, timeout_s)
        finally:
            if message["task"] not in ("warm_math", "start"):
                seconds[0] = max(seconds[0], time.monotonic() - started)

    monkeypatch.setattr(worker_pool._Worker, "_exchange", timed)
    return seconds


@pytest.mark.slow
@pytest.mark.long  # test_worker_pool.py: one formula that hangs
def test_formulas_that_hang_stall_nobody(longest):
    rng = random.Random(3)
    kinds = [ENDLESS if rng.random() < 0.08 else str(rng.choice([1, 2, 3])) for _ in range(5 * SIZE)]
    hangs = kinds.count(ENDLESS)
    assert hangs >= 3
    grader = Grader(RewardsConfig(timeout_s=TIMEOUT_S))
    try:
        labelled = [
            g.model_copy(update={"question": g.question.model_copy(update={"answers": ["4/2"]})})
            for g in groups(kinds, "math")
        ]
        with ThreadPoolExecutor(4) as actor:
            scored = list(actor.map(grader.score, labelled))
        rewards = [(t.answer, t.reward, t.unscored) for g in scored for t in g.trajectories]
        assert all((reward, cause) == (float(answer == "2"), None) for answer, reward, cause in rewards)
        counts = grader.services.counts
        assert counts["math_timeout"] + counts["math_out_of_memory"] >= len(
            {g.id for g in scored for t in g.trajectories if t.answer == ENDLESS}
        )
        assert grader.services.math_workers.idle == grader.services.math_workers.size
        assert longest[0] < TIMEOUT_S + 10.0  # on a machine with other work; a formula alone takes for ever
    finally:
        grader.close()
