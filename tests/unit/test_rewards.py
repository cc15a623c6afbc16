"""Rewards of whole groups: what scores, what is unscored, and the curiosity of the Pixel-Reasoner paper."""

from __future__ import annotations

import pytest

from pixelis.config import Curiosity, Rewards, RewardWeights
from pixelis.records import Action, Group, Observation, Question, StopReason, Trajectory, Turn
from pixelis.rewards import terms
from pixelis.rewards.scorers import SCORERS, exact
from pixelis.rewards.terms import score_group

ALL = Rewards(weights=RewardWeights(accuracy=1, format=0.5, curiosity=1))
CALL = "<tool_call>{}</tool_call>"


def episode(answer: str | None, ok: int = 0, failed: int = 0, stop=StopReason.ANSWER, **more) -> Trajectory:
    turns = [Turn(role="user", text="?")]
    for status in ["ok"] * ok + ["error"] * failed:
        turns.append(Turn(role="assistant", text=CALL, action=Action(op="zoom_in")))
        turns.append(Turn(role="tool", observation=Observation(status=status)))
    turns.append(Turn(role="assistant", text=f"<answer>{answer}</answer>"))
    return Trajectory(question_id="q", group_id="g", turns=turns, answer=answer, stop_reason=stop, **more)


def group(*trajectories: Trajectory, answers=("7",), scorer="exact") -> Group:
    question = Question(id="q", question="?", answers=None if answers is None else list(answers), scorer=scorer)
    return Group(id="g", question=question, trajectories=list(trajectories))


@pytest.mark.parametrize(
    ("answer", "truths", "score"),
    [
        ("7", ["7"], 1.0),
        (" Seven\n Dwarfs ", ["seven dwarfs"], 1.0),
        ("STRASSE", ["Straße"], 1.0),
        ("cafe\u0301", ["café"], 1.0),
        ("1", ["7", "1"], 1.0),
        ("17", ["7"], 0.0),
        ("", ["7"], 0.0),
        (None, ["7"], 0.0),
        (None, ["None"], 0.0),
    ],
)
def test_exact(answer, truths, score):
    assert exact(answer, truths) == score


def test_reward_is_the_weighted_sum_of_raw_terms():
    first, second = score_group(group(episode("7", ok=1), episode("1")), ALL).trajectories
    assert first.rewards == {"accuracy": 1.0, "format": 1.0, "curiosity": 0.0}
    assert first.reward == pytest.approx(1.5)
    assert second.rewards == {"accuracy": 0.0, "format": 1.0, "curiosity": 0.0}
    assert second.reward == pytest.approx(0.5)
    assert first.unscored is second.unscored is None


def test_curiosity_is_the_papers_form_on_the_groups_rate():
    # One caller of eight: 0.5 * (0.3 - 1/8) = 0.0875, the largest bonus the paper can give with G = 8.
    scored = score_group(group(episode("1", ok=1), *[episode("1") for _ in range(7)]), ALL).trajectories
    assert [t.rewards["curiosity"] for t in scored] == pytest.approx([0.0875] + [0.0] * 7)
    # Every call beyond the first costs 0.05; a rate above H earns nothing; failed calls neither earn nor cost.
    busy = score_group(group(episode("1", ok=3), episode("1", ok=1), episode("1", failed=4)), ALL).trajectories
    assert [t.rewards["curiosity"] for t in busy] == pytest.approx([-0.1, 0.0, 0.0])
    other = Curiosity(target=1.0, alpha=2.0, free_calls=0, beta=0.1)
    assert terms.curiosity(episode("1", ok=2), 0.5, other) == pytest.approx(2.0 * 0.5 - 0.2)


def test_episodes_that_the_system_broke_are_unscored_and_leave_the_groups_rate_alone():
    broken = episode(None, ok=1, stop=StopReason.ERROR, unscored="bad_token")
    late = episode(None, ok=1, stop=StopReason.DEADLINE)
    scored = score_group(group(episode("7", ok=1), *[episode("7") for _ in range(7)], broken, late), ALL).trajectories
    assert scored[0].rewards["curiosity"] == pytest.approx(0.0875)
    assert [(t.reward, t.rewards, t.unscored) for t in scored[-2:]] == [(None, {}, "bad_token"), (None, {}, "deadline")]


@pytest.mark.parametrize("stop", [StopReason.NO_ACTION, StopReason.LENGTH, StopReason.OVER_TURN, StopReason.OVER_CONTEXT])
def test_episodes_that_the_policy_wasted_score_zero(stop):
    (trajectory,) = score_group(group(episode(None, stop=stop)), ALL).trajectories
    assert (trajectory.reward, trajectory.rewards["accuracy"], trajectory.rewards["format"]) == (0.0, 0.0, 0.0)


def test_no_truth_is_unscored_and_a_pseudo_label_scores_without_looking_at_the_truth():
    for answers in (None, []):
        (blind,) = score_group(group(episode("7"), answers=answers), ALL).trajectories
        assert (blind.reward, blind.unscored) == (None, "no_truth")
        assert "accuracy" not in blind.rewards
    unscored = score_group(group(episode("7"), episode("1"), answers=None), ALL)
    assert [t.reward for t in score_group(unscored, ALL, truths=["7"]).trajectories] == [1.5, 0.5]
    misled = score_group(group(episode("7"), episode("1"), answers=["1"]), ALL, truths=["7"])
    assert [t.rewards["accuracy"] for t in misled.trajectories] == [1.0, 0.0]
    assert all(t.unscored is None for t in misled.trajectories)


def test_a_scorer_that_fails_is_a_cause_not_a_zero(monkeypatch):
    def raises(answer, truths):
        raise ValueError("hung up")

    monkeypatch.setitem(SCORERS, "raises", raises)
    monkeypatch.setitem(SCORERS, "nan", lambda answer, truths: float("nan"))
    for scorer, cause in (("raises", "scorer_failed"), ("nan", "not_finite"), ("judge", "unknown_scorer")):
        (trajectory,) = score_group(group(episode("7"), scorer=scorer), ALL).trajectories
        assert (trajectory.reward, trajectory.unscored) == (None, cause)
    (foreign,) = score_group(group(episode("7", dialect="klingon")), ALL).trajectories
    assert (foreign.reward, foreign.unscored) == (None, "unknown_dialect")


def test_format_wants_every_turn_well_formed():
    good = episode("7", ok=2)
    assert terms.format(good) == 1.0
    for change in ({"text": "zoom " + CALL}, {"error": "bad_box"}):
        turns = [good.turns[0], good.turns[1].model_copy(update=change), *good.turns[2:]]
        assert terms.format(good.model_copy(update={"turns": turns})) == 0.0
    assert terms.format(Trajectory(question_id="q")) == 0.0


def test_scoring_leaves_the_given_group_as_it_was():
    before = group(episode("7", ok=1), episode(None, stop=StopReason.ERROR))
    copy = before.model_copy(deep=True)
    score_group(before, ALL)
    assert before == copy
