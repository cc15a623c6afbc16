"""Votes, the gate, and update tasks: invariants of what traffic may teach."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelis.actors.update_queue import QueuedTask, UpdateQueue
from pixelis.config import EvolutionConfig, RewardsConfig, parse
from pixelis.errors import BadInput
from pixelis.evolution.gate import gate
from pixelis.evolution.updates import as_group, make_task, relabel
from pixelis.records import Group, ImageView, Question, StopReason, Trajectory, Turn, UpdateTask, Verdict
from pixelis.rewards.vote import TIE, majority


def group(answers: list[str | None], truths: list[str] | None = None) -> Group:
    question = Question(id="q1", question="which digit?", answers=truths, meta={"truth": truths})
    trajectories = [
        Trajectory(
            id=f"t{i}",
            question_id="q1",
            group_id="g1",
            images=[
                ImageView(id="img0", uri="data:image/png;base64,AAAA"),
                ImageView(id="obs1", parent="img0"),
            ],
            turns=[
                Turn(role="user", tokens=[1, 2]),
                Turn(
                    role="assistant",
                    text=f"<answer>{answer}</answer>",
                    tokens=[3, 4, 5],
                    log_probs=[-0.1, -0.2, -0.3 - i / 10],
                ),
            ],
            answer=answer,
            stop_reason=StopReason.ANSWER if answer is not None else StopReason.LENGTH,
            policy_version=3,
            rewards={"accuracy": 1.0},
            reward=9.0,
            advantage=4.0,
        )
        for i, answer in enumerate(answers)
    ]
    return Group(id="g1", question=question, trajectories=trajectories, policy_version=3)


def test_majority_counts_every_sample_in_the_denominator() -> None:
    verdict = majority(["7", "7", "8", None])
    assert (verdict.answer, verdict.confidence, verdict.reason) == ("7", 0.5, "")
    assert [v.answer for v in verdict.votes] == ["7", "7", "8", None]
    assert majority(["a"] * 4 + ["b", "c"]).confidence == pytest.approx(0.667, abs=1e-3)


def test_answers_are_compared_canonically_and_spelled_as_first_given() -> None:
    verdict = majority([" New  York", "new york", "Paris", "NEW YORK"])
    assert (verdict.answer, verdict.confidence) == (" New  York", 0.75)


def test_a_tie_reports_the_first_and_never_teaches() -> None:
    verdict = majority(["8", "7", "7", "8"])
    assert (verdict.answer, verdict.confidence, verdict.reason) == ("8", 0.5, TIE)
    assert not gate(verdict, EvolutionConfig(gate=0.0))


@pytest.mark.parametrize(("confidence", "opens"), [(0.8, True), (0.7, True), (0.69999, False), (0.6, False)])
def test_the_gate_is_inclusive(confidence: float, opens: bool) -> None:
    verdict = Verdict(answer="7", confidence=confidence, strategy="majority")
    assert gate(verdict, EvolutionConfig(gate=0.7)) is opens
    assert gate(verdict, EvolutionConfig(gate=0.7, enabled=False)) is False


def test_a_task_scores_each_sample_by_its_own_answer() -> None:
    served = group(["7", "7", " 7", "7", "8", None])
    task = make_task(
        served,
        majority([t.answer for t in served.trajectories]),
        EvolutionConfig(gate=0.6),
        RewardsConfig(),
        now=12.0,
    )
    assert [t.rewards["accuracy"] for t in task.trajectories] == [1, 1, 1, 1, 0, 0]
    assert [t.reward for t in task.trajectories] == [1, 1, 1, 1, 0, 0]
    assert (task.pseudo_label, task.confidence, task.created_at) == ("7", pytest.approx(4 / 6), 12.0)
    # The caller's picture does not travel k times
    assert all(t.images[0].uri == "" for t in task.trajectories)
    assert [t.token_ids() for t in task.trajectories] == [t.token_ids() for t in served.trajectories]
    assert UpdateTask.model_validate_json(task.model_dump_json()) == task


def test_a_closed_gate_makes_no_task() -> None:
    served = group(["7", "8", "9", "7"])
    assert (
        make_task(served, majority(["7", "8", "9", "7"]), EvolutionConfig(gate=0.7), RewardsConfig()) is None
    )


def test_options_are_part_of_the_question_not_of_its_truth() -> None:
    served = group(["(B) 7", "B", "b.", "A"])
    question = served.question.model_copy(
        update={"scorer": "mc_letter", "meta": {"options": ["5", "7"], "truth": "A"}}
    )
    verdict = Verdict(answer="7", confidence=0.75, strategy="majority")
    task = make_task(
        served.model_copy(update={"question": question}), verdict, EvolutionConfig(), RewardsConfig()
    )
    assert [t.reward for t in task.trajectories] == [1, 1, 1, 0]


def test_relabel_scores_again_and_keeps_the_rest() -> None:
    served = group(["7", "7", "7", "8"])
    task = make_task(
        served,
        majority(["7", "7", "7", "8"]),
        EvolutionConfig(),
        RewardsConfig(),
        now=1.0,
        experience_id="exp_1",
    )
    assert task is not None
    corrected = relabel(task, served.question, " 8", RewardsConfig())
    assert [t.reward for t in corrected.trajectories] == [0, 0, 0, 1]
    assert (corrected.id, corrected.pseudo_label, corrected.confidence) == (task.id, " 8", 0.75)
    assert relabel(corrected, served.question, "7", RewardsConfig()) == task
    with pytest.raises(BadInput, match="blank"):
        relabel(task, served.question, "  ", RewardsConfig())


def test_a_task_becomes_the_learners_group() -> None:
    served = group(["7", "7", "7", "8"])
    task = make_task(served, majority(["7", "7", "7", "8"]), EvolutionConfig(), RewardsConfig())
    assert task is not None
    unit = as_group(task)
    assert (unit.id, unit.policy_version, len(unit.trajectories)) == ("g1", 3, 4)
    assert unit.question.answers is None
    assert unit.question.media == []


@given(st.integers(1, 6), st.lists(st.one_of(st.booleans(), st.just("take")), max_size=40))
def test_the_queue_keeps_the_newest_tasks_and_counts_dropped_ones(limit: int, moves: list) -> None:
    queue = UpdateQueue(parse({"evolution": {"queue": limit, "batch": 1}}), Counter())
    model: list[QueuedTask] = []
    dropped = 0
    for move in moves:
        if move == "take":
            first = {id(item) for item in model[:2]}
            assert queue.remove(lambda item, first=first: id(item) in first) == [
                item.task for item in model[:2]
            ]
            model = model[2:]
        elif len(model) == limit - 1 and move:
            removed = queue.remove(lambda item: not item.approved)
            assert removed == [item.task for item in model if not item.approved]
            model = [item for item in model if item.approved]
        else:
            task = UpdateTask(
                question_id="q", trajectories=[], pseudo_label="7", confidence=1.0, created_at=0.0
            )
            item = QueuedTask(task, None, "q", move)  # type: ignore[arg-type]
            queue.push(item)
            model.append(item)
            dropped += len(model) > limit
            model = model[-limit:]
        assert (list(queue.items), queue.dropped) == (model, dropped)
