"""Learning from a caller stops while its votes are rarely clear, and only for that caller."""

from __future__ import annotations

import random

from pixelis.config import VotingConfig
from pixelis.evolution import gate
from pixelis.evolution.gate import ClearShare

CONFIG = VotingConfig(min_clear=0.25)


def traffic(share: ClearShare, user: str, clear: float, requests: int, seed: int = 0) -> list[bool]:
    """The decisions about the clear verdicts of a user of whose requests a share is clear."""
    draw, unclear, decisions = random.Random(seed), 0, []
    for _ in range(requests):
        if draw.random() < clear:
            decisions.append(share.add(user, unclear))
            unclear = 0
        else:
            unclear += 1
    return decisions


def test_a_user_whose_votes_are_rarely_clear_teaches_nothing_and_hinders_nobody():
    share = ClearShare(CONFIG)
    assert all(traffic(share, "known", 0.6, 500))
    strange = traffic(share, "strange", 0.1, 500)
    assert sum(strange) < 8, "only until half a window was seen"
    assert not any(strange[8:])
    assert all(traffic(share, "known", 0.6, 500, seed=1))


def test_a_user_may_teach_again_when_its_votes_become_clear():
    share = ClearShare(CONFIG)
    traffic(share, "user", 0.05, 300)
    assert not share.add("user", 0)
    assert all(traffic(share, "user", 0.8, 200)[32:])


def test_users_beyond_the_limit_are_forgotten(monkeypatch):
    monkeypatch.setattr(gate, "MAX_USERS", 3)
    share = ClearShare(CONFIG)
    for number in range(5):
        share.add(f"user{number}", 0)
    assert list(share.recent) == ["user2", "user3", "user4"]
