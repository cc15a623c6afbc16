"""Votes of whole trajectories: answers weighted by how alike the operations behind them are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from votes import NOW, QUESTION, voting

from pixelis.records import Action, Trajectory, Turn
from pixelis.rewards.vote import ABSTAINED, action_similarity, vote


def zoom(*box: float) -> Action:
    return Action(op="zoom_in", arguments={"box": list(box)})


READ = Action(op="read_text", target="obs1")
LEFT, RIGHT = zoom(0, 0, 0.5, 1), zoom(0.5, 0, 1, 1)


def sample(i: int, answer: str | None, *actions: Action) -> Trajectory:
    turns = [Turn(role="assistant", action=a) for a in actions] + [Turn(role="assistant", text=answer or "")]
    return Trajectory(id=f"t{i}", question_id="q", turns=turns, answer=answer)


@pytest.mark.parametrize(
    ("a", "b", "similarity"),
    [
        ([], [], 1.0),
        ([LEFT], [], 0.0),
        ([LEFT, READ], [LEFT, READ], 1.0),
        ([LEFT, READ], [READ], 0.5),
        ([LEFT, READ], [READ, LEFT], 0.5),
        ([LEFT], [RIGHT], 0.5),
        ([LEFT], [zoom(0, 0, 1, 1)], 0.75),
        ([LEFT], [READ], 0.0),
    ],
)
def test_the_similarity_of_sequences(a, b, similarity) -> None:
    assert action_similarity(a, b) == pytest.approx(similarity)


SEQUENCES = st.lists(
    st.sampled_from([LEFT, RIGHT, READ, zoom(0, 0, 1, 1), zoom(0.2, 0.2, 0.2, 0.3)]), max_size=5
)


@given(SEQUENCES, SEQUENCES)
def test_similarity_is_symmetric_and_1_for_equal_sequences(a, b) -> None:
    assert action_similarity(a, b) == pytest.approx(action_similarity(b, a))
    assert 0 <= action_similarity(a, b) <= 1
    assert action_similarity(a, a) == pytest.approx(1.0)


def test_an_answer_that_was_reached_in_unlike_ways_is_trusted_less() -> None:
    alike = [sample(0, "7", LEFT, READ), sample(1, "7", LEFT, READ), sample(2, "8", RIGHT)]
    unlike = [sample(0, "7", LEFT, READ), sample(1, "7", READ, LEFT, LEFT), sample(2, "8", RIGHT)]
    first, second = (vote(s, [], voting("trajectory"), QUESTION, NOW) for s in (alike, unlike))
    assert (first.answer, first.confidence, first.reason) == ("7", pytest.approx(2 / 3), "")
    assert second.confidence < first.confidence
    assert [v.weight for v in first.votes] == pytest.approx([1.0, 1.0, 1.0])


def test_two_alike_outvote_three_unlike() -> None:
    ways = [("7", LEFT), ("7", READ), ("7", READ, RIGHT, RIGHT), ("8", RIGHT, READ), ("8", RIGHT, READ)]
    trajectories = [sample(i, *way) for i, way in enumerate(ways)]
    assert vote(trajectories, [], voting(), QUESTION, NOW).answer == "7"
    verdict = vote(trajectories, [], voting("trajectory"), QUESTION, NOW)
    assert (verdict.answer, verdict.confidence) == ("8", pytest.approx(0.4))


def test_it_abstains_below_the_minimum_confidence() -> None:
    trajectories = [sample(0, "7", LEFT), sample(1, "7", READ), sample(2, "7", READ, RIGHT, RIGHT)]
    assert vote(trajectories, [], voting(abstain=0.8), QUESTION, NOW).answer == "7"
    verdict = vote(trajectories, [], voting("trajectory", abstain=0.8), QUESTION, NOW)
    assert (verdict.answer, verdict.reason) == (None, ABSTAINED)
    assert not any(v.elected for v in verdict.votes)


@given(st.lists(st.tuples(st.sampled_from(["7", "8", None]), SEQUENCES), max_size=6))
def test_verdicts_are_valid(answered) -> None:
    trajectories = [sample(i, answer, *actions) for i, (answer, actions) in enumerate(answered)]
    verdict = vote(trajectories, [], voting("trajectory"), QUESTION, NOW)
    assert 0 <= verdict.confidence <= 1
    assert all(0 < v.weight <= 1 for v in verdict.votes)
