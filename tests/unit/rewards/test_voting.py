"""Votes of samples and neighbours: strategies, compatibility, provenance, and what never teaches."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from votes import NOW, QUESTION, Answered, sample, samples, voting

from pixelis.config import EvolutionConfig
from pixelis.datasets import cards
from pixelis.evolution.gate import gate
from pixelis.operations.image import details
from pixelis.records import Experience, Feedback, Media, Neighbour, Question, Trajectory, Turn, Verdict
from pixelis.rewards.scorers import canonical
from pixelis.rewards.vote import (
    ABSTAINED,
    COLD_START,
    INSUFFICIENT,
    NO_ANSWER,
    OVERRULED,
    TIE,
    agreement_factor,
    compatible,
    direct,
    majority,
    neighbour_weight,
    self_confidence,
    vote,
)

STRATEGIES = ["majority", "weighted", "confidence", "ensemble"]


def neighbour(answer: str | None, similarity: float = 1.0, **changes: Any) -> Neighbour:
    reason, confidence = changes.pop("reason", ""), changes.pop("confidence", 1.0)
    question = Question(id="old", question=" which  DIGIT? ", media=[Media(id="img0", uri="memory:img0")])
    fields = {
        "question": question,
        "trajectory": Trajectory(question_id="old"),
        "verdict": Verdict(answer=answer, confidence=confidence, strategy="majority", reason=reason),
        "policy_version": 1,
        "created_at": NOW,
        "priority": 2.0,
    }
    return Neighbour(experience=Experience(**{**fields, **changes}), similarity=similarity)


def elect(*answered: Answered, strategy: str = "majority", memory=(), **config: Any) -> Verdict:
    """The vote of samples and neighbours."""
    return vote(samples(*answered), list(memory), voting(strategy, **config), QUESTION, NOW)


# -- the pinned values


def test_weighted_is_the_share_of_weight_times_the_agreement_factor() -> None:
    verdict = elect(("7", 0.9), ("7", 0.6), ("8", 0.5), strategy="weighted")
    assert verdict.answer == "7"
    assert verdict.confidence == pytest.approx(1.5 / 2.0 * agreement_factor(2 / 3))
    assert verdict.answer_weights == {"7": pytest.approx(1.5), "8": pytest.approx(0.5)}


@pytest.mark.parametrize(("best", "confidence"), [(0.8, 0.8), (0.5, 0.5), (0.4, 0.2)])
def test_confidence_takes_the_best_vote_and_halves_a_weak_one(best: float, confidence: float) -> None:
    verdict = elect(("7", 0.3), ("7", 0.3), ("8", best), strategy="confidence")
    assert (verdict.answer, verdict.confidence) == ("8", pytest.approx(confidence))


def test_an_ensemble_is_the_mean_and_a_fifth_more_when_unanimous() -> None:
    united = elect(("7", 0.6), ("7", 0.5), ("7", 0.5), ("8", 0.2), strategy="ensemble")
    parts = [0.75, 1.6 / 1.8 * agreement_factor(0.75), 0.6]
    assert (united.answer, united.confidence) == ("7", pytest.approx(min(1.0, 1.2 * sum(parts) / 3)))
    assert united.strategies == {"majority": "7", "weighted": "7", "confidence": "7"}
    split = elect(("7", 0.5), ("7", 0.5), ("8", 0.9), strategy="ensemble")
    assert split.strategies == {"majority": "7", "weighted": "7", "confidence": "8"}
    mean = (2 / 3 + 1 / 1.9 * agreement_factor(2 / 3) + 0.9) / 3
    assert (split.answer, split.confidence) == ("7", pytest.approx(mean))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_few_votes_give_the_own_answer_with_half_confidence(strategy: str) -> None:
    verdict = elect(("7", 0.8), ("8", 0.9), strategy=strategy)
    assert (verdict.answer, verdict.self_answer, verdict.reason) == ("7", "7", INSUFFICIENT)
    assert verdict.confidence == pytest.approx(0.25 if strategy == "majority" else 0.4)
    for silent in (elect(strategy=strategy), elect((None, 0.9), ("  ", 0.9), strategy=strategy)):
        assert (silent.answer, silent.confidence, silent.reason) == (None, 0.0, NO_ANSWER)


def test_the_agreement_factor_rises_and_keeps_its_published_range() -> None:
    values = [agreement_factor(i / 1000) for i in range(1001)]
    assert values == sorted(values)
    assert (values[0], values[1000]) == (0.5, 1.0)
    assert max(b - a for a, b in itertools.pairwise(values)) < 0.001  # no jump at .3
    assert agreement_factor(0.7) == pytest.approx(0.8)
    assert all(0.7 < value <= 1 for value in values[501:])


# -- confidence of a sample


def test_self_confidence_is_of_the_answer_turn() -> None:
    def last(log_prob: float) -> Trajectory:
        turns = [Turn(role="assistant", tokens=[1], log_probs=[log_prob])]
        return Trajectory(question_id="q", turns=turns)

    assert self_confidence(sample(("7", 0.8))) == pytest.approx(0.8)
    assert self_confidence(sample(("7", 0.0))) == self_confidence(Trajectory(question_id="q")) == 0.0
    assert self_confidence(last(1e-7)) == 1.0  # rounding of the engine
    assert self_confidence(last(math.nan)) == 0.0


def test_the_cold_start_answers_directly() -> None:
    verdict = direct([sample(("7", 0.8))])
    assert (verdict.answer, verdict.strategy, verdict.reason) == ("7", "direct", COLD_START)
    assert verdict.confidence == pytest.approx(0.8)
    assert direct([sample((None, 0.8))]).confidence == 0.0
    later = direct([sample((None, 0.8)), sample(("7", 0.6)), sample(("8", 0.9))])
    assert (later.answer, later.confidence, later.self_answer) == ("7", pytest.approx(0.6), None)


# -- neighbours

SOUND = Feedback(correct=True)
WRONG = Feedback(correct=False)


@pytest.mark.parametrize(
    ("other", "votes"),
    [
        (neighbour("7"), True),
        (neighbour("7", 0.9), True),
        (neighbour("7", 0.89), False),
        (neighbour("7", math.nan), False),
        (neighbour(None), False),
        (neighbour(" "), False),
        (neighbour("7", question=Question(id="o", question="Which letter?", media=QUESTION.media)), False),
        (neighbour("7", question=Question(id="o", question="Which digit?")), False),
        (neighbour("7", question=QUESTION.model_copy(update={"meta": {"options": ["7", "8"]}})), False),
        (neighbour("7", reason=COLD_START, cold_start=True), False),
        (neighbour("7", reason=TIE), False),
        (neighbour("7", status="failed"), False),
        (neighbour("7", status="archived"), False),
        (neighbour("7", status="processed"), True),
        (neighbour("7", feedback=[WRONG]), False),
        (neighbour("7", feedback=[WRONG, SOUND]), True),
        (neighbour("7", feedback=[SOUND, WRONG, Feedback(comment="hm")]), False),
        (neighbour("7", feedback=[Feedback(answer="8")]), False),
        (neighbour("7", feedback=[Feedback(answer=" 7 ")]), True),
    ],
)
def test_compatible_experiences_vote(other: Neighbour, votes: bool) -> None:
    assert compatible(QUESTION, other, voting()) is votes
    verdict = vote(samples(*[("7", 0.9)] * 3), [other], voting(), QUESTION, NOW)
    assert len(verdict.votes) == 3 + votes
    assert verdict.neighbours == 1


@pytest.mark.parametrize(
    ("values", "weight"),
    [
        ({}, 1.0),
        ({"confidence": 0.6}, 0.6),
        ({"similarity": 0.96}, 0.96),
        ({"created_at": NOW - 24 * 3600}, math.exp(-1)),
        ({"created_at": NOW + 500}, 1.0),
        ({"priority": 0.5}, 0.625),
        ({"retrievals": 4, "successes": 1}, 0.625),
        ({"retrievals": 4, "successes": 0}, 0.5),
    ],
)
def test_the_weight_of_a_neighbour(values: dict[str, Any], weight: float) -> None:
    assert neighbour_weight(neighbour("7", **values), EvolutionConfig(), NOW) == pytest.approx(weight)


def test_feedback_removes_a_vote_and_never_casts_one() -> None:
    """Whoever answers 8 to every experience gets no vote for 8."""
    poisoned = [neighbour("7", feedback=[Feedback(correct=False, answer="8")])] * 5
    verdict = elect(*[("7", 0.9)] * 3, ("8", 0.9), memory=poisoned)
    assert (verdict.answer, verdict.confidence, len(verdict.votes)) == ("7", 0.75, 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "answered",
    [[*[("7", 0.6)] * 3, (None, 0.9)], [("7", 0.6), ("9", 0.6)], [(None, 0.9), (None, 0.9)]],
    ids=["clear", "torn", "silent"],
)
def test_neighbours_that_overrule_the_samples_never_teach(answered: list[Answered], strategy: str) -> None:
    verdict = elect(*answered, strategy=strategy, memory=[neighbour("8") for _ in range(9)])
    assert (verdict.answer, verdict.reason) == ("8", OVERRULED)
    assert not gate(verdict, EvolutionConfig(gate=0.0))


def test_an_experience_of_a_picture_that_differs_in_a_detail_has_no_vote() -> None:
    """A detail of 28 x 28 pixels in 768 x 768, which the vector of a small view cannot see."""
    scene = cards.scene_of("test", 7, 3)
    members, labels = cards._members("mnist", "test"), cards._digits("mnist")[1]
    other = int(members[labels[members] != scene.target.digit][0])
    changed = replace(scene, cards=(replace(scene.target, image=other), *scene.cards[1:]))
    picture, noise = cards.world("test").picture(scene), np.random.default_rng(0).normal(0, 6, (768, 768, 3))
    shown = {
        "same": picture,
        "noise": np.clip(picture + noise, 0, 255).astype(np.uint8),
        "half": np.asarray(Image.fromarray(picture).reduce(2)),
        "changed": cards.world("test").picture(changed),
    }

    def about(name: str) -> Question:
        media = [Media(id="img0", uri="memory:img0", details=details(shown[name]) if name in shown else "")]
        return QUESTION.model_copy(update={"media": media})

    memory = {name: neighbour("7", question=about(name)) for name in [*shown, "not stored"]}
    votes = {name for name, own in memory.items() if compatible(about("same"), own, voting())}
    assert votes == {"same", "noise", "half", "not stored"}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("owners", "decide"),
    [
        (["app.ann"] * 7, True),  # the caller's own
        (["app.bob"] * 7, False),
        (["app.bob", "app.cid"] * 3, False),
        (["app.bob", "app.cid", "app.dan"] * 2, True),
        (["app.bob", "app.cid", "app."] * 2, True),  # some name no user
        (["app.bob", "app.cid", "web.dan"] * 3, False),
        (["web.ann", "web.bob", "web.cid"] * 3, False),  # another key
        ([None, "ann"] * 4, False),  # without a key
    ],
)
def test_no_other_key_and_no_other_user_alone_decides(
    owners: list[str | None], decide: bool, strategy: str
) -> None:
    trajectories, memory = samples(*[("7", 0.6)] * 4), [neighbour("8", user=owner) for owner in owners]
    right = [neighbour("7", user="app.eve")]  # another answer does not count towards the users of 8
    verdict = vote(trajectories, memory + right, voting(strategy), QUESTION, NOW, caller="app.ann")
    assert (verdict.answer == "8", verdict.reason == OVERRULED) == (decide, decide)
    if not decide:
        alone = vote(trajectories, [], voting(strategy), QUESTION, NOW)
        assert (verdict.confidence, len(verdict.votes)) == (alone.confidence, 4)


def test_neighbours_support_doubt_and_break_a_tie() -> None:
    answered = [*[("7", 0.9)] * 4, *[("8", 0.9)] * 2]
    assert elect(*answered, memory=[neighbour("7")] * 2).confidence == 0.75
    assert elect(*answered, memory=[neighbour("8")]).confidence == pytest.approx(4 / 7)
    tied = elect(("8", 0.9), ("7", 0.9), memory=[neighbour("7")])
    assert (tied.answer, tied.reason) == ("7", "")


# -- verdicts


def test_provenance_is_complete() -> None:
    memory = [neighbour("7", 0.95), neighbour("7", 0.1)]
    verdict = elect(("7", 0.9), ("8", 0.4), ("7", 0.8), strategy="weighted", memory=memory)
    assert (verdict.self_answer, verdict.neighbours, verdict.strategy) == ("7", 2, "weighted")
    assert [v.source for v in verdict.votes] == ["sample"] * 3 + ["neighbour"]
    assert [v.id for v in verdict.votes[:3]] == ["t0", "t1", "t2"]
    assert verdict.votes[3].id.startswith("exp_")
    assert [v.confidence for v in verdict.votes] == pytest.approx([0.9, 0.4, 0.8, 1.0])
    assert [v.weight for v in verdict.votes] == pytest.approx([0.9, 0.4, 0.8, 0.95])
    assert [v.similarity for v in verdict.votes] == [None, None, None, 0.95]
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_a_winner_below_the_abstain_share_is_no_answer() -> None:
    answered = [("7", 0.9), ("7", 0.9), ("8", 0.9), ("9", 0.9), (None, 0.9)]
    assert elect(*answered, abstain=0.4).answer == "7"
    verdict = elect(*answered, abstain=0.41)
    assert (verdict.answer, verdict.confidence, verdict.reason) == (None, 0.0, ABSTAINED)


ANSWERED = st.lists(
    st.tuples(st.one_of(st.none(), st.sampled_from(["7", "8", " 7", "x", ""])), st.floats(0, 1)), max_size=9
)
NEIGHBOURS = st.lists(
    st.builds(
        neighbour,
        st.sampled_from(["7", "8", "x", None]),
        st.floats(-1, 1),
        confidence=st.floats(0, 1),
        priority=st.floats(0.01, 9),
        retrievals=st.integers(0, 3),
        successes=st.integers(0, 3),
        created_at=st.floats(0, 2e6),
    ),
    max_size=4,
)


@given(ANSWERED, NEIGHBOURS, st.sampled_from(STRATEGIES), st.randoms(use_true_random=False))
def test_verdicts_are_valid_and_clear_ones_do_not_depend_on_order(
    answered: list[Answered], neighbours: list[Neighbour], strategy: str, random
) -> None:
    trajectories, config = samples(*answered), voting(strategy)
    verdict = vote(trajectories, neighbours, config, QUESTION, NOW)
    assert 0 <= verdict.confidence <= 1
    assert all(0 <= v.weight <= 1 for v in verdict.votes)
    assert (verdict.answer is None) == (verdict.reason in (NO_ANSWER, ABSTAINED))
    if verdict.answer is not None:
        assert canonical(verdict.answer) in verdict.answer_weights
    shuffled, moved = list(trajectories), list(neighbours)
    random.shuffle(shuffled)
    random.shuffle(moved)
    verdict_again = vote(shuffled, moved, config, QUESTION, NOW)
    if not verdict.reason:
        # A sample said so
        assert any(canonical(t.answer or "") == canonical(verdict.answer or "") for t in trajectories)
        assert verdict_again.answer is not None
        assert canonical(verdict_again.answer) == canonical(verdict.answer or "")
        assert (verdict_again.confidence, verdict_again.reason) == (pytest.approx(verdict.confidence), "")


def test_a_tie_of_weights_inside_an_ensemble_has_one_confidence_in_any_order() -> None:
    trajectories = samples(("7", 0.0), ("8", 0.0), ("7", 0.0), ("7", 1.0), ("8", 1.0))
    there, back = (
        vote(order, [], voting("ensemble"), QUESTION, NOW) for order in (trajectories, trajectories[::-1])
    )
    assert there.answer == back.answer == "7"
    assert there.confidence == pytest.approx(back.confidence)


@given(ANSWERED, st.floats(0.05, 1))
def test_equal_weights_make_weighted_a_majority(answered: list[Answered], weight: float) -> None:
    trajectories = samples(*((answer, weight) for answer, _ in answered))
    even, weighted = (vote(trajectories, [], voting(s), QUESTION, NOW) for s in ("majority", "weighted"))
    assert (even.answer, even.reason) == (weighted.answer, weighted.reason)
    if not even.reason:
        assert weighted.confidence == pytest.approx(even.confidence * agreement_factor(even.confidence))


@given(ANSWERED)
def test_the_vote_of_samples_is_the_majority_of_their_answers(answered: list[Answered]) -> None:
    bare = majority([answer for answer, _ in answered])
    full = vote(samples(*answered), [], voting(), QUESTION, NOW)
    assert (bare.answer, bare.confidence, bare.reason) == (full.answer, full.confidence, full.reason)
