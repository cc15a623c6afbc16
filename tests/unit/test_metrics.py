"""Summaries of episodes and of batches."""

from __future__ import annotations

import pytest

from pixelis.evaluation.batches import batch_metrics, learnt_votes
from pixelis.evaluation.metrics import exploration_efficiency, has_loop, operation_counts, summarise
from pixelis.records import Action, Group, Observation, Question, StopReason, Trajectory, Turn

CALL = Action(op="zoom_in", arguments={"box": [0, 0, 0.5, 0.5]})


def policy_turn(action=None, error=None):
    return Turn(role="assistant", tokens=[1], log_probs=[-0.1], action=action, error=error)


def reply(status):
    observation = Observation(status=status, code=None if status == "ok" else "bad_box")
    return Turn(role="tool", tokens=[2], observation=observation)


def episode(question="q", *, accuracy=None, turns=(), stop=StopReason.ANSWER, answer=None, **fields):
    rewards = {} if accuracy is None else {"accuracy": accuracy}
    return Trajectory(
        question_id=question, turns=list(turns), rewards=rewards, stop_reason=stop, answer=answer, **fields
    )


def test_a_summary_by_hand():
    zoomed = [policy_turn(CALL), reply("ok"), policy_turn()]
    failed = [policy_turn(CALL), reply("error"), policy_turn(error="bad_json"), reply("error"), policy_turn()]
    cut = [policy_turn(CALL)]
    items = [
        episode("q1", accuracy=1.0, turns=zoomed),
        episode("q2", accuracy=0.0, turns=failed),
        episode("q3", accuracy=1.0, turns=[policy_turn()]),
        episode("q4", accuracy=0.0, turns=cut, stop=StopReason.OVER_TURN),
    ]
    summary = summarise(items)
    assert summary["accuracy"] == 0.5
    assert summary["ci95"] == pytest.approx([0.150, 0.850], abs=1e-3)
    assert (summary["n"], summary["questions"], summary["unscored"]) == (4, 4, {})
    assert summary["rapr"] == 0.25
    assert (summary["operations"], summary["tool_error_rate"]) == (4, 0.5)
    assert summary["turns"] == pytest.approx((2 + 3 + 1 + 1) / 4)
    assert summary["stop_reasons"] == {"answer": 3, "over_turn": 1}


def test_operations_are_counted_once_each():
    assert operation_counts(
        episode(turns=[policy_turn(CALL), reply("ok"), policy_turn(CALL), reply("error"), policy_turn()])
    ) == (2, 1)
    assert operation_counts(episode(turns=[policy_turn(error="bad_json"), reply("error")])) == (1, 1)
    assert operation_counts(episode(turns=[policy_turn(CALL)], stop=StopReason.OVER_TURN)) == (1, 0)
    assert operation_counts(episode(turns=[policy_turn()])) == (0, 0)
    assert operation_counts(episode(turns=[policy_turn(error="bad_token")], stop=StopReason.ERROR)) == (0, 0)


@pytest.mark.parametrize(
    ("calls", "loops", "exploration"),
    [
        ("", False, 1.0),
        ("AAAA", True, 0.25),
        ("AA", False, 0.5),
        ("ABAB", True, 0.5),
        ("ABCAB", False, 0.6),
        ("XABCABCY", True, 5 / 8),
        ("ABCDEFGHIJKLMNOP", False, 0.9),
        ("ABCDEFGHIJKLMNOPQRSTU", False, 0.8),
    ],
)
def test_loops_and_exploration(calls, loops, exploration):
    assert has_loop(calls) is loops
    assert exploration_efficiency(calls) == pytest.approx(exploration)


def test_unscored_episodes_are_never_wrong_ones():
    summary = summarise([episode("a", accuracy=1.0), episode("b", unscored="judge_timeout"), episode("c")])
    assert (summary["accuracy"], summary["n"]) == (1.0, 1)
    assert summary["unscored"] == {"judge_timeout": 1, "not_scored": 1}


def test_groups_are_clusters_not_independent_episodes():
    groups = [
        Group(id=f"g{i}", question=Question(id=f"q{i}", question="?"), trajectories=episodes)
        for i in range(20)
        for episodes in [[episode(f"q{i}", accuracy=float(i % 2), group_id=f"g{i}") for _ in range(8)]]
    ]
    clustered = summarise(groups)
    low, high = clustered["ci95"]
    assert (clustered["n"], clustered["questions"], clustered["accuracy"]) == (160, 20, 0.5)
    # 20 questions know far less than 160 episodes (whose Wilson interval is 0.15 wide)
    assert high - low > 0.35


@pytest.mark.parametrize(
    ("right", "wrong", "right_shown"), [(9, 9, 2), (0, 9, 0), (9, 0, 4), (1, 2, 1), (0, 0, 0)]
)
def test_pages_show_as_many_right_as_wrong_episodes(right, wrong, right_shown):
    from pixelis.actors.report import choose

    question = Question(id="q", question="?")
    groups = [
        Group(id="g", question=question, trajectories=[episode(accuracy=accuracy, group_id="g")])
        for accuracy in [1.0] * right + [0.0] * wrong
    ]
    chosen = choose("step 1", groups, [None] * len(groups), 4)
    assert len(chosen) == min(4, right + wrong)
    assert sum(group.trajectories[0].rewards["accuracy"] for _, group, _ in chosen) == right_shown


def voted(name: str, *rewards: tuple[float, float | None]) -> Group:
    """A group of (vote, accuracy) by rollout."""
    group = Group(id=name, question=Question(id=name, question="?"))
    for vote, accuracy in rewards:
        played = episode(name, accuracy=accuracy, group_id=name, reward=vote)
        played.rewards["majority_vote"] = vote
        group.trajectories.append(played)
    return group


def test_votes_are_measured_as_labels_and_without_truths_by_agreement_alone():
    right = voted("a", (1, 1), (1, 1), (1, 1), (0, 0))
    wrong = voted("b", (1, 0), (1, 0), (0, 1), (0, 0))
    result = batch_metrics([right, wrong])
    assert result["vote/majority_ratio"] == result["vote/majority_voting_reward"] == (0.75 + 0.5) / 2
    assert result["vote/label_accuracy"] == 0.5
    assert result["vote/reward_accuracy"] == (4 + 1) / 8
    assert (result["vote/pass_at_n"], result["vote/none"]) == (1, 0)
    assert result["vote/truth_share"] == 4 / 8
    few = [group.model_copy(update={"trajectories": group.trajectories[-2:]}) for group in (right, wrong)]
    assert learnt_votes(few) == {
        "vote/learnt_reward_accuracy": 3 / 4,
        "vote/learnt_truth_share": 2 / 4,
        "vote/learnt_pass_at_n": 1,
    }
    silent = voted("c", (1, None), (0, None))
    none = voted("d", (1, None), (0, None))
    for trajectory in none.trajectories:
        trajectory.rewards, trajectory.reward, trajectory.unscored = {}, None, "tie"
    result = batch_metrics([silent, none])
    assert result["vote/none"] == 0.5
    assert result["vote/majority_ratio"] == 0.5
    partial = batch_metrics([voted("e", (1, None), (0.5, None), (0, None), (1, None))])
    assert (partial["vote/majority_ratio"], partial["vote/majority_voting_reward"]) == (0.5, 0.625)
    assert "vote/label_accuracy" not in result
    assert learnt_votes([silent, none]) == {}
