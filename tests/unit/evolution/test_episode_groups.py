"""What a group of an outside agent's episodes teaches: by rewards, by the vote, or nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelis.config import AdvantageConfig, EvolutionConfig, RewardsConfig
from pixelis.evolution.episode_groups import Lesson, bounded, experience_verdict, lesson
from pixelis.evolution.traffic_questions import MIN_CONFIDENCE
from pixelis.evolution.updates import agreeing, as_group, relabel, speaking_for
from pixelis.policy.advantages import assign_advantages
from pixelis.records import Experience, Question, StopReason, Trajectory, Turn
from pixelis.rewards.vote import CLOSED

EVOLUTION, REWARDS = EvolutionConfig(gate=0.7), RewardsConfig()
REWARD = st.floats(-1e6, 1e6)


def episode(number: int, answer: str | None, reward: float | None = None, **more: Any) -> Experience:
    said = more.pop("said", answer or "no idea")
    turns = [
        Turn(role="user", tokens=[1]),
        Turn(role="assistant", text=said, tokens=[2, 3], log_probs=[-0.1, -0.2]),
    ]
    question = Question(id=f"q{number}", question=more.pop("question", "Which digit?"), answers=["truth"])
    trajectory = Trajectory(
        id=f"t{number}",
        question_id=f"q{number}",
        group_id="g",
        turns=turns,
        answer=answer,
        stop_reason=more.pop("stop", StopReason.ANSWER),
        outcome=None if reward is None else {"accuracy": reward},
    )
    verdict = experience_verdict(trajectory, question, EVOLUTION, 0.0)
    return Experience(
        id=f"exp_{number}",
        question=question,
        trajectory=trajectory,
        verdict=verdict,
        policy_version=0,
        created_at=0.0,
    )


def taught(episodes: Sequence[Experience]) -> Lesson:
    return lesson(episodes, EVOLUTION, REWARDS, "ann", 7.0)


def group(answers: Sequence[str | None], rewards: Sequence[float | None]) -> list[Experience]:
    return [episode(i, a, r) for i, (a, r) in enumerate(zip(answers, rewards, strict=True))]


def advantages(found: Lesson) -> list[float | None]:
    assert found.task is not None
    assign_advantages([as_group(found.task)], AdvantageConfig(scale="none"))
    return [t.advantage for t in found.task.trajectories]


def test_the_reward_teaches_even_what_few_samples_say() -> None:
    found = taught(group(["8", "8", "8", "7"], [0, 0, 0, 1]))
    assert found.task is not None
    task = found.task
    assert (task.pseudo_label, task.user, task.created_at, task.experience_id) == ("7", "ann", 7.0, "exp_3")
    assert task.confidence == pytest.approx(1 / 8), "a single answer, halved"
    assert [t.reward for t in task.trajectories] == [0, 0, 0, 1]
    assert advantages(found) == [-0.25, -0.25, -0.25, 0.75]
    assert [t.id for t in agreeing(task.trajectories, task.pseudo_label)] == ["t3"]
    assert task.experiences == {f"t{i}": f"exp_{i}" for i in range(4)}
    assert found.verdict is not None
    assert found.verdict.reason in CLOSED


def test_a_right_answer_with_a_low_reward_is_not_imitated() -> None:
    found = taught(group(["7", "7", "8"], [1.0, 0.2, 0.0]))
    assert found.task is not None
    assert [t.id for t in agreeing(found.task.trajectories, "7")] == ["t0"]


@pytest.mark.parametrize(
    ("answers", "rewards", "cause"),
    [
        ("777", [1, 1, 1], "equal_rewards"),
        ("78", [0.1 + 0.2, 0.3], "equal_rewards"),
        ("777", [1, None, None], "few_rewards"),
        ("7", [1], "few_rewards"),
        ("789", [None] * 3, "tie"),
        ("7789", [None] * 4, "unclear"),
        ("7", [None], "insufficient_votes"),
    ],
)
def test_a_group_without_a_difference_or_a_clear_vote_teaches_nothing(
    answers: str, rewards: list[float | None], cause: str
) -> None:
    found = taught(group(answers, rewards))
    assert (found.task, found.cause) == (None, cause)


def test_without_rewards_the_vote_decides_behind_the_gate() -> None:
    found = taught(group(["7", "7", "8", "7"], [None] * 4))
    assert found.task is not None
    assert (found.task.pseudo_label, found.task.confidence) == ("7", pytest.approx(0.75))
    assert [t.rewards["accuracy"] for t in found.task.trajectories] == [1, 1, 0, 1]
    assert found.task.experience_id == "exp_0"
    other = [*group(["7", "7", "7"], [None] * 3), episode(3, "7", question="And this one?")]
    assert taught(other).cause == "different_questions"


def test_failures_of_an_agent_are_no_rewards() -> None:
    failed = episode(9, None, stop=StopReason.ERROR)
    found = taught([*group("78", [1, 0]), failed])
    assert found.task is not None
    assert [t.id for t in found.task.trajectories] == ["t0", "t1"]
    assert taught([failed]).cause == "failed"


@given(st.lists(REWARD, min_size=2, max_size=12), st.floats(1e-3, 1e3), st.floats(-1e5, 1e5))
def test_no_scale_of_a_client_outweighs_another(rewards: list[float], scale: float, shift: float) -> None:
    found = taught(group(["7"] * len(rewards), [scale * r + shift for r in rewards]))
    if found.task is not None:
        values = [t.reward for t in found.task.trajectories]
        assert all(value is not None and 0 <= value <= 1 for value in values)
        assert all(abs(a or 0.0) <= 1 for a in advantages(found))


@given(st.lists(REWARD, min_size=2, max_size=12))
def test_a_better_reward_never_has_the_smaller_advantage(rewards: list[float]) -> None:
    found = taught(group([str(i) for i in range(len(rewards))], rewards))
    if found.task is not None:
        ranked = sorted(zip(rewards, advantages(found), strict=True))
        for (_, worse), (_, better) in itertools.pairwise(ranked):
            assert worse is not None
            assert better is not None
            assert worse <= better or math.isclose(worse, better)
        assert bounded(rewards)[rewards.index(max(rewards))] == max(bounded(rewards))


@given(st.lists(st.tuples(st.sampled_from("78"), st.sampled_from([0.0, 1.0])), min_size=2, max_size=16))
def test_a_canary_question_needs_the_agreement_of_the_samples(samples: list[tuple[str, float]]) -> None:
    """Whatever is rewarded: less than a clear majority of what the policy says is no truth of the canary."""
    found = taught(group([a for a, _ in samples], [r for _, r in samples]))
    if found.task is not None and found.task.confidence >= MIN_CONFIDENCE:
        share = sum(a == found.task.pseudo_label for a, _ in samples) / len(samples)
        assert share >= MIN_CONFIDENCE
        assert len(samples) >= 3


def test_answers_that_a_client_gives_are_no_votes() -> None:
    claimed = [episode(i, "8", 1.0, said="<answer>7</answer>") for i in range(7)]
    found = taught([*claimed, episode(7, "7", 0.0)])
    assert found.task is not None
    assert (found.task.pseudo_label, found.task.confidence) == ("8", 0.0)


def test_an_experience_of_an_episode_never_votes() -> None:
    for reward in (None, 1.0):
        assert episode(0, "7", reward).verdict.reason in CLOSED
    assert episode(0, "7", 1.0).verdict.strategy == "reward"


def test_a_reviewer_overrides_a_reward() -> None:
    found = taught(group(["8", "7", "8"], [1, 0, 0]))
    assert found.task is not None
    corrected = relabel(found.task, Question(id="q", question="Which digit?"), "7", REWARDS)
    assert [t.reward for t in corrected.trajectories] == [0, 1, 0]
    assert [t.id for t in agreeing(corrected.trajectories, "7")] == ["t1"]


def test_a_repeated_group_has_the_same_task_and_feedback_finds_the_label() -> None:
    episodes = group(["8", "7", "7"], [0, 1, 1])
    first, again = taught(episodes).task, taught(episodes[::-1]).task
    assert first is not None
    assert again is not None
    assert first.id == again.id
    assert speaking_for(first) == {"exp_1", "exp_2"}
