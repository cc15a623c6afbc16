"""Adapting to questions without answers: measures, its end, and the rewards that it refuses.

No truth reaches a reward or a weight: tests/properties/test_scrambled_truths.py.
"""

from __future__ import annotations

import pytest

from pixelis import config
from pixelis.actors import rollouts
from pixelis.actors.rollout_buffer import RolloutBuffer, ScoredGroup
from pixelis.errors import BadConfig, DataFailure
from pixelis.jobs import ttrl
from pixelis.records import Group, Question, StopReason, Trajectory, Turn
from pixelis.rewards.terms import score_group
from pixelis.telemetry.events import EventLog

TTRL = config.RewardsConfig(preset="ttrl", vote={"min_share": 0.5, "tie": "abstain"})  # type: ignore[arg-type]
ANSWERS = [["3", "3", "8", "3"], ["1", "7", "7", None], ["2", "2", "2", "2"], ["4", "5", "4", "5"]]


def group(answers: list[str | None], name: str = "q", truths: list[str] | None = None) -> Group:
    episodes = [
        Trajectory(
            id=f"{name}-{i}",
            question_id=name,
            group_id=name,
            turns=[Turn(role="user", text="?"), Turn(role="assistant", text=f"<answer>{answer}</answer>")],
            answer=answer,
            stop_reason=StopReason.ANSWER if answer is not None else StopReason.LENGTH,
        )
        for i, answer in enumerate(answers)
    ]
    return Group(id=name, question=Question(id=name, question="?", answers=truths), trajectories=episodes)


def scored(truths: list[list[str] | None]) -> list[Group]:
    return [
        score_group(group(a, f"q{i}", t), TTRL) for i, (a, t) in enumerate(zip(ANSWERS, truths, strict=True))
    ]


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([0.5] * 3, False),  # too few to compare
        ([0.5, 0.5, 0.6, 0.6], False),
        ([0.5, 0.5, 0.504, 0.504], True),
        ([0.6, 0.6, 0.5, 0.5], True),
        ([0.1, 0.1, 0.5, 0.5, 0.9, 0.9], False),
        ([0.1, 0.9, 0.9, 0.9, 0.9], True),
    ],
)
def test_a_run_ends_when_the_votes_agree_no_further(values: list[float], ends: bool) -> None:
    settings = config.TtrlConfig(patience=2, min_gain=0.005)
    assert ttrl.plateau(values, settings) is ends
    assert not ttrl.plateau(values, config.TtrlConfig(patience=0))


def test_shares_are_those_of_the_steps_and_count_groups_without_a_majority(tmp_path) -> None:
    log = EventLog(tmp_path)
    # The second step was made again after a restart
    for step, share, none in ((1, 0.5, 0.0), (2, 0.8, 0.5), (2, 0.8, 0.25)):
        log.write("step/policy", step=step, **{"vote/majority_ratio": share, "vote/none": none})
    log.write("step/policy", step=3, **{"vote/none": 1.0})
    assert ttrl.shares(tmp_path) == pytest.approx([0.5, 0.6, 0.0])


def test_pass_at_1_is_the_mean_of_the_episodes_and_the_majority_one_answer() -> None:
    groups = scored([["3"], ["1"], ["2"], ["5"]])
    agreement, single, majority = ttrl.votes(groups, TTRL)
    assert agreement == {"q0": 0.75, "q1": 0.5, "q2": 1.0, "q3": 0.5}
    assert single == {"q0": 0.75, "q1": 0.25, "q2": 1.0, "q3": 0.5}
    assert majority == {"q0": 1.0, "q1": 0.0, "q2": 1.0, "q3": 0.0}  # a tie goes to the answer given first
    result = ttrl.compare(groups, groups, TTRL, seed=0)
    assert result["pass@1"]["before"]["mean"] == pytest.approx(0.625)
    assert result["pass@1"]["difference"]["ci95"] == [0.0, 0.0]


def test_episodes_without_an_answer_do_not_win() -> None:
    assert ttrl.votes([score_group(group([None, None, " ", "4"], truths=["4"]), TTRL)], TTRL)[2] == {"q": 1.0}
    expected = ({"q": 0.0}, {"q": 0.0}, {"q": 0.0})
    assert ttrl.votes([score_group(group([None, None], truths=["4"]), TTRL)], TTRL) == expected


@pytest.mark.parametrize(
    ("rewards", "named"),
    [
        ({"preset": "ttrl", "weights": {"accuracy": 0.1}}, "rewards.weights.accuracy"),
        ({"preset": "ttrl", "weights": {"length": 0.5}}, "rewards.weights.length"),
        ({"preset": "ttrl", "tasks": {"counting": {}}}, "rewards.weights.accuracy"),
        ({"preset": "ttrl", "own": {"own_rewards:reward": 1.0}}, "rewards.own"),
        ({"preset": "ttrl", "curriculum": {"kind": "trigger"}}, "rewards.curriculum.kind=trigger"),
        ({"preset": "ttrl", "curriculum": {"kind": "steps"}}, "rewards.curriculum.steps"),
        (
            {"preset": "ttrl", "curriculum": {"kind": "steps", "steps": [[0, 0, 0, 1], [9, 1, 0, 0]]}},
            "rewards.curriculum.steps",
        ),
        ({"weights": {"accuracy": 0.0, "format": 1.0}}, "majority_vote is 0"),
    ],
)
def test_a_reward_that_may_look_at_a_truth_is_refused(rewards: dict, named: str) -> None:
    with pytest.raises(BadConfig, match=named):
        ttrl.require_unlabelled(config.parse({"rewards": rewards}))


def batch_of(groups: list[Group | str], questions: int, max_oversampling: float) -> rollouts.RolloutBatch:
    """A batch from groups that questions give in this order, instead of from generators."""
    filter = {"max_oversampling": max_oversampling}
    rft = {"prompts_per_step": questions, "group_size": 4, "filter": filter}
    settings = config.parse({"rft": rft, "rewards": TTRL.model_dump()})
    source = rollouts.Rollouts(settings, None, [None])  # type: ignore[arg-type, list-item]
    buffer, numbers = RolloutBuffer(settings.rft, 0), iter(range(len(groups)))
    while (selection := buffer.take(lambda _: 0)) is None:
        for _ in range(buffer.room(0)):
            buffer.admit()
            number = next(numbers)
            if isinstance(item := groups[number], str):
                buffer.add_failed(number, item)
            elif rollouts.abstains(item):
                buffer.add_unusable(ScoredGroup(item, None, number=number), abstained=True)  # type: ignore[arg-type]
            else:
                buffer.add(ScoredGroup(item, None, number=number))  # type: ignore[arg-type]
    return source.assemble(0, selection)


def test_groups_that_abstain_are_replaced_and_counted_and_are_no_failures() -> None:
    agreed, _, _, tied = scored([None] * 4)
    batch = batch_of([tied, agreed, tied, tied, tied, agreed, agreed], questions=2, max_oversampling=3.0)
    assert [g.id for g in batch.groups] == ["q0", "q0"]
    assert batch.metrics["vote/none"] == pytest.approx(4 / 6)
    assert batch.metrics["rollout/unusable_groups"] == 0.0
    assert batch_of([tied, agreed, tied, agreed], questions=2, max_oversampling=1.0).numbers == [0, 1], (
        "no more questions than allowed"
    )


def test_a_batch_in_which_all_abstain_says_what_to_do() -> None:
    tied = scored([None] * 4)[3]
    with pytest.raises(DataFailure, match="none of the 4 questions") as error:
        batch_of([tied] * 5, questions=2, max_oversampling=2.0)
    assert "min_share" in str(error.value.fix)
