"""A vote that collapses on one answer is detected, unchanged traffic is not."""

from __future__ import annotations

import random

import pytest

from pixelis.config import VotingConfig
from pixelis.evolution.collapse import WINDOW, Collapse
from pixelis.records import Verdict

DIGITS = [str(digit) for digit in range(10)]


def says(answer: str | None) -> Verdict:
    return Verdict(answer=answer, confidence=0.9, strategy="majority")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "weights"), [(DIGITS, [1] * 10), (["yes", "no"], [1, 1]), (["yes", "no"], [4, 1])]
)
def test_the_same_traffic_never_alarms(answers: list[str], weights: list[int]) -> None:
    for seed in range(2):
        rng, collapse = random.Random(seed), Collapse(VotingConfig())
        assert not any(collapse.add(says(a)) for a in rng.choices(answers, weights, k=800))


@pytest.mark.parametrize("answers", [DIGITS, ["yes", "no"]])
def test_one_answer_for_everything_alarms_within_a_window_and_stays(answers: list[str]) -> None:
    rng, collapse = random.Random(1), Collapse(VotingConfig())
    for _ in range(100):
        assert not collapse.add(says(rng.choice(answers)))
    alarms = [collapse.add(says(answers[0].upper() + " ")) for _ in range(500)]
    first = alarms.index(True)
    assert first < WINDOW
    assert all(alarms[first:])  # the baseline does not follow the collapse
    assert collapse.stats()["collapsed"] == 1
    assert collapse.stats()["top_share"] == 1
    assert collapse.stats()["normal_share"] < 0.7


def test_a_slow_slide_alarms_before_it_is_complete() -> None:
    rng, collapse = random.Random(2), Collapse(VotingConfig())
    for i in range(500):
        slide = max(0.0, (i - 100) / 400)
        if collapse.add(says("7" if rng.random() < slide else rng.choice(DIGITS))):
            assert slide < 0.95
            return
    pytest.fail("the slide was not detected")


def test_variety_ends_the_alarm_and_reset_takes_a_new_baseline() -> None:
    rng, collapse = random.Random(3), Collapse(VotingConfig())
    for answer in [*rng.choices(DIGITS, k=64), *["7"] * 64]:
        collapse.add(says(answer))
    assert collapse.collapsed
    assert not [collapse.add(says(a)) for a in rng.choices(DIGITS, k=64)][-1]
    collapse.reset()
    assert not any(collapse.add(says("7")) for _ in range(300))  # uniform from the start


def test_repeated_prompts_and_abstentions_do_not_count() -> None:
    rng, collapse = random.Random(4), Collapse(VotingConfig())
    for i, answer in enumerate(rng.choices(DIGITS, k=64)):
        collapse.add(says(answer), prompt=f"p{i}")
    assert not any(collapse.add(says("7"), prompt="again") for _ in range(300))
    assert not any(collapse.add(says(answer)) for answer in [None, "", " "] * 100)
    assert collapse.stats()["winners"] == 64
