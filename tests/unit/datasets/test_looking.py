"""Whether to look or to answer at once: labels, the threshold, and the demonstrations of either."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_episodes import episode, group

from pixelis.config import CanaryConfig, RewardsConfig, load
from pixelis.datasets.card_questions import read_demonstrations
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.refinement.filters import Outcomes
from pixelis.datasets.refinement.looking import (
    Played,
    answers_at_once,
    demonstration,
    mixture,
)
from pixelis.evolution import canary
from pixelis.jobs.distill import choose_threshold, distil
from pixelis.policy.model_path import resolve
from pixelis.records import Question
from pixelis.rewards.services import Services

REWARDS = RewardsConfig()
SCORES = st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=4)
HELD_OUT = st.lists(st.builds(Outcomes, SCORES, SCORES), min_size=2, max_size=40).flatmap(
    lambda rows: st.integers(1, 30).map(lambda n: {str(i): row for i, row in enumerate(rows * n)})
)
EASY, HARD = Outcomes([1.0] * 4, [1.0] * 4), Outcomes([1.0] * 4, [0.0, 0.0, 0.0, 1.0])


@pytest.fixture
def services(tmp_path) -> Iterator[Services]:
    made = Services(REWARDS, tmp_path)
    yield made
    made.close()


@given(HELD_OUT, st.sampled_from([0.01, 0.03, 0.1]), st.sampled_from([0.05, 0.3]))
def test_the_threshold_never_accepts_an_inferior_mixture(held_out, tolerance, risk):
    config = CanaryConfig(tolerance=tolerance, risk=risk)
    threshold, decisions = choose_threshold(held_out, config)
    tested = list(decisions)
    assert tested == sorted(tested, reverse=True)
    assert tested[0] == 1.0
    assert all(decision.bound >= -tolerance for decision in list(decisions.values())[:-1])
    if threshold is not None:
        looking = {id: outcomes.rate for id, outcomes in held_out.items()}
        mixed = {id: mixture(outcomes, threshold) for id, outcomes in held_out.items()}
        decision = canary.compare(mixed, looking, config)
        assert decision.mean >= decision.bound >= -tolerance
        assert decision.reason not in ("fell", "inconclusive", "too_few_questions")


@given(HELD_OUT)
def test_more_tolerance_never_looks_more(held_out):
    thresholds = [
        choose_threshold(held_out, CanaryConfig(tolerance=tolerance))[0]
        for tolerance in (0.01, 0.03, 0.1, 0.3)
    ]
    chosen = [2.0 if threshold is None else threshold for threshold in thresholds]
    assert chosen == sorted(chosen, reverse=True)


def test_easy_questions_are_answered_at_once_and_hard_ones_are_not():
    held_out = {f"{name}{i}": outcomes for i in range(150) for name, outcomes in (("e", EASY), ("h", HARD))}
    config = CanaryConfig(tolerance=0.03)
    threshold, _ = choose_threshold(held_out, config)
    assert threshold == 2 / 3
    assert answers_at_once(EASY, threshold)
    assert not answers_at_once(HARD, threshold)
    assert choose_threshold({"e": EASY}, config)[0] is None, "too few"
    assert not answers_at_once(EASY, None)


def test_an_episode_does_not_vouch_for_itself():
    assert mixture(HARD, 1 / 3) == pytest.approx(1 / 4), "three wait for the right one, which has no company"
    assert mixture(Outcomes([1.0], [0.0, 0.0, 1.0]), 1 / 2) == pytest.approx(1 / 3)
    assert mixture(HARD, 2 / 3) == 1.0
    assert mixture(Outcomes([], [1.0, 1.0]), 0.5) is None


def test_without_truths_a_clear_vote_of_the_looking_episodes_is_the_label(services):
    glance = group(episode("3"), episode("7"), answers=None)
    looking = group(*(episode(answer, ok=1) for answer in ("7", "7", "3")), answers=None)
    played = Played.of(looking, glance, REWARDS, services)
    assert played.outcomes == Outcomes([1.0, 1.0, 0.0], [0.0, 1.0])
    tied = group(*(episode(answer, ok=1) for answer in ("7", "3")), answers=None)
    assert Played.of(tied, glance, REWARDS, services).outcomes == Outcomes()


def test_demonstrations_are_right_episodes_of_the_chosen_arm(services):
    def scored(answer: str, ok: int = 0, failed: int = 0):
        made = episode(answer, ok, failed)
        made.rewards = {"accuracy": float(answer == "7")}
        for turn in made.replies:
            turn.tokens = [1, 2]
        return made

    looking = group(scored("3", 1), scored("7"), scored("7", 1, 1), scored("7", 2), scored("7", 1))
    glance = group(scored("7"), scored("3"), scored("7"))
    played = Played.of(looking, glance, REWARDS, services)
    (shown,) = played.demonstrations(None, keep=1)
    assert [step.op for step in shown.turns] == ["zoom_in", None], "a guess and a failed call are not shown"
    assert shown.turns[-1].answer == "7"
    assert len(played.demonstrations(None, keep=9)) == 2
    direct = played.demonstrations(0.5, keep=9)
    assert [len(d.turns) for d in direct] == [1, 1]
    assert len({d.id for d in direct}) == 2
    assert played.demonstrations(1.0, keep=1) == [shown]


@pytest.mark.parametrize("looks", [1, 2])
def test_a_question_that_is_looked_at_may_be_demonstrated_more_often(services, looks):
    """Too few are held out to choose a threshold, so that all look; three of the episodes are right."""
    config = load("configs/nano/distill.yaml", [f"distill.looks={looks}", "distill.holdout=0.1"])

    def scored(answer: str, ok: int = 0):
        made = episode(answer, ok)
        made.rewards = {"accuracy": float(answer == "7")}
        return made

    looking = group(scored("7", 1), scored("7", 1), scored("7", 1), scored("3", 1))
    played = Played.of(looking, group(scored("3"), scored("7")), REWARDS, services)
    demonstrations, summary = distil(config, [played])
    assert summary["threshold"] is None
    assert [len(d.steps) for d in demonstrations] == [1] * looks


def test_a_demonstration_plays_to_the_tokens_of_its_episode():
    player = Player(load("configs/nano/base.yaml"), str(resolve("nano")))
    for row in read_demonstrations("cards:?split=train&sizes=1,10", 6, seed=1, direct_share=0.5):
        played, views = player.play(row)
        again, views_again = player.play(demonstration(Question.of(row), played, 0))
        assert again.token_ids() == played.token_ids()
        assert again.answer == played.answer
        assert [view.tobytes() for view in views_again] == [view.tobytes() for view in views]
