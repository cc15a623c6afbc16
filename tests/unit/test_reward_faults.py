"""Scorers and own rewards that hang, crash, raise or give nonsense, 5 % each: nothing stalls, no bad number gets through.

Goal F6: 0 stalls, a hung call reclaimed within its limit and a second, no NaN reward, every fault counted by cause.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_children import ENDLESS
from test_rewards import episode

from pixelis import config
from pixelis.config import Rewards
from pixelis.policy.advantages import group_advantages
from pixelis.records import Group, Question
from pixelis.rewards import children
from pixelis.rewards.grader import Grader

LIMIT_S = 1.0
FAULTS = {
    "hang": "timeout",
    "crash": "crashed",
    "raise": "raised",
    "nan": "not_finite",
    "inf": "not_finite",
    "length": "wrong_type",
}
GROUPS, SIZE = 30, 8


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
    """Seconds of the longest call of a child, once it had started."""
    seen = [0.0]
    exchange = children._Child._exchange

    def timed(self, message, limit_s):
        started = time.monotonic()
        try:
            return exchange(self, message, limit_s)
        finally:
            if "warm" not in message["do"]:
                seen[0] = max(seen[0], time.monotonic() - started)

    monkeypatch.setattr(children._Child, "_exchange", timed)
    return seen


def test_faults_of_own_rewards_cost_their_samples_only(monkeypatch, longest):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    rng = random.Random(0)
    kinds = [
        next((k for i, k in enumerate(FAULTS) if draw < 0.05 * (i + 1)), "fine") for draw in (rng.random() for _ in range(240))
    ]
    assert set(kinds) == {*FAULTS, "fine"}
    grader = Grader(Rewards(own=["own_rewards:by_answer"], own_limit_s=LIMIT_S, own_children=2))
    started = time.monotonic()
    try:
        with ThreadPoolExecutor(4) as actor:  # as the Scorer actor does
            scored = list(actor.map(grader.score, groups(kinds)))
        spent = time.monotonic() - started
        causes = Counter(t.unscored for g in scored for t in g.trajectories)
        wanted = Counter(f"own_reward:{FAULTS[kind]}" for kind in kinds if kind in FAULTS)
        assert causes == {**wanted, None: kinds.count("fine")}
        assert grader.tools.counts == wanted
        assert grader.tools.own_reward_children.idle == 2
        assert longest[0] < LIMIT_S + 1.0
        assert spent < 60
        metrics = grader.advance(0).metrics
        assert metrics["scorer/own_replaced"] == wanted["own_reward:timeout"] + wanted["own_reward:crashed"]
        assert metrics["scorer_seconds/exact_max"] < LIMIT_S
        for group in scored:
            rewards = [t.reward for t in group.trajectories]
            assert all(r is None or math.isfinite(r) for r in rewards)
            advantages = group_advantages(rewards, config.Advantage())
            assert all(a is None or math.isfinite(a) for a in advantages)
            assert [t.reward for t in group.trajectories if t.answer == "fine"] == [2.0] * rewards.count(2.0)
    finally:
        grader.close()


def test_formulas_that_hang_stall_nobody(longest):
    rng = random.Random(3)
    kinds = [ENDLESS if rng.random() < 0.05 else str(rng.choice([1, 2, 3])) for _ in range(10 * SIZE)]
    hangs = kinds.count(ENDLESS)
    assert hangs >= 3
    grader = Grader(Rewards(math={"limit_s": LIMIT_S}))
    try:
        made = [
            g.model_copy(update={"question": g.question.model_copy(update={"answers": ["4/2"]})}) for g in groups(kinds, "math")
        ]
        with ThreadPoolExecutor(4) as actor:
            scored = list(actor.map(grader.score, made))
        rewards = [(t.answer, t.reward, t.unscored) for g in scored for t in g.trajectories]
        assert sum(cause in ("timeout", "out_of_memory") for _, _, cause in rewards) >= hangs
        settled = [(answer, reward) for answer, reward, cause in rewards if cause is None]
        assert all(reward == float(answer == "2") for answer, reward in settled)
        assert len(settled) >= 0.9 * len(rewards) - hangs
        assert grader.tools.math_children.idle == grader.tools.math_children.size
        assert longest[0] < LIMIT_S + 1.0
    finally:
        grader.close()
