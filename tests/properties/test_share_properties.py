"""The caps on shares of an update: they hold for every batch and candidate."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pixelis.config import load
from pixelis.evolution.shares import WINDOW_S, NearQuestions, Shares, Source, most_abundant

SOURCES = st.lists(st.builds(Source, st.sampled_from("abcdefg"), st.sampled_from("123456789")), max_size=120)


def shares_of(user: float, question: float, every: int = 4) -> Shares:
    settings = {"max_share_per_user": user, "max_share_per_question": question, "canary.every": every}
    return Shares(load(None, [f"evolution.{key}={value}" for key, value in settings.items()]).evolution)


def most(names: Counter[str]) -> int:
    return max(names.values(), default=0)


PARTS = st.sampled_from([0.1, 0.25, 0.5, 1.0])


@settings(deadline=None)
@given(SOURCES, PARTS, PARTS, st.integers(1, 16), st.integers(1, 5))
def test_no_user_and_no_question_exceeds_its_share_of_a_batch_or_candidate(
    traffic: list[Source], user: float, question: float, size: int, every: int
) -> None:
    shares = shares_of(user, question, every)
    for source in traffic:  # all users are known before the first batch
        shares.note(source.user, 0.0)
    allowed = max(user, 1 / max(len({s.user for s in traffic}), 1))
    waiting, batches, candidate = list(traffic), 0, list[Source]()
    while chosen := shares.choose(waiting, 1, size, 0.0):
        batch = [waiting[i] for i in chosen]
        waiting = [s for i, s in enumerate(waiting) if i not in set(chosen)]
        shares.learnt(batch)
        candidate += batch
        for tasks in (batch, candidate):
            assert most(Counter(s.user for s in tasks)) <= math.ceil(allowed * len(tasks) - 1e-9)
            assert most(Counter(s.question for s in tasks)) <= math.ceil(question * len(tasks) - 1e-9)
        batches += 1
        if batches % every == 0:
            assert shares.published().tasks == len(candidate)
            candidate = []


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(st.integers(1, 8), st.integers(1, 16), st.integers(1, 5), st.integers(0, 2**32))
# A candidate that three of four users had filled to their caps waited forever
@example(users=5, size=3, every=4, seed=0)
def test_a_user_alone_learns_and_several_never_wait_for_each_other_forever(
    users: int, size: int, every: int, seed: int
) -> None:
    """Users appear one after the other and ask different questions."""
    # Thousands of draws by hypothesis itself would exceed what it records.
    shares = shares_of(0.25, 0.25, every)
    queue = list[Source]()
    questions = itertools.count()
    draw = random.Random(seed)
    batches = 0
    for present in range(1, users + 1):
        before = batches
        for _ in range(60 * size):
            source = Source(f"user{draw.randrange(present)}", f"q{next(questions)}")
            shares.note(source.user, 0.0)
            queue.append(source)
            if chosen := shares.choose(queue, size, size, 0.0):
                shares.learnt([queue[i] for i in chosen])
                queue = [s for i, s in enumerate(queue) if i not in set(chosen)]
                batches += 1
                if batches % every == 0:
                    shares.published()
        assert batches > before


def test_a_user_leaves_the_window() -> None:
    shares = shares_of(0.25, 1.0)
    shares.note("guest", 0.0)
    queue = [Source("owner", f"q{i}") for i in range(8)]
    shares.note("owner", 10.0)
    assert shares.choose(queue, 8, 8, 10.0) == []
    assert shares.user_cap(10.0) == 0.5
    assert shares.choose(queue, 8, 8, 86_401.0) == list(range(8))


def test_a_flood_gives_up_its_own_tasks() -> None:
    names = [("a", "1"), ("flood", "2"), ("b", "3"), ("flood", "4"), ("flood", "4")]
    waiting = [Source(user, question) for user, question in names]
    assert most_abundant(waiting) == 3


def test_near_identical_questions_are_one_group() -> None:
    rng, near = np.random.default_rng(0), NearQuestions()
    picture = np.kron(rng.integers(0, 256, (6, 6, 3)), np.ones((40, 40, 1))).astype(np.uint8)
    noisy = np.clip(picture + rng.integers(-20, 21, picture.shape), 0, 255).astype(np.uint8)
    first = near.group("Which digit is in the red frame?", picture)
    for text, view in [
        ("WHICH digit  is in the red frame", noisy),
        ("Which di\u200bgit is in the red frame? (17)", picture[2:, :-1]),
    ]:
        assert near.group(text, view) == first
    assert near.group("How many cards are there?", picture) != first
    other = np.kron(rng.integers(0, 256, (6, 6, 3)), np.ones((40, 40, 1))).astype(np.uint8)
    assert near.group("Which digit is in the red frame?", other) != first
    assert near.group("Which digit?", None) == near.group("which digit", None) != first


def test_a_restart_frees_no_user_of_a_cap() -> None:
    """One caller waits for a restart, after which it would be the only user known."""
    shares = shares_of(0.25, 1.0, every=2)
    for user in "abcde":
        shares.note(user, 0.0)
    traffic = [Source(user, f"question {user}") for user in "abcd"]
    shares.learnt([traffic[i] for i in shares.choose(traffic, 4, 4, 10.0)])
    state = json.loads(json.dumps(shares.state(10.0, 1000.0)))
    eve = [Source("e", f"other {i}") for i in range(8)]
    for wall, cap in ((1020.0, 0.25), (900.0, 0.25), (1000.0 + 2 * WINDOW_S, 1.0)):
        restarted = shares_of(0.25, 1.0, every=2)
        assert restarted.user_cap(0.0) == 1.0
        restarted.restore(state, 5.0, wall)
        assert restarted.user_cap(5.0) == cap
        if cap < 1:
            assert not restarted.choose(eve, 2, 4, 5.0)
            assert restarted.published().tasks == 4
