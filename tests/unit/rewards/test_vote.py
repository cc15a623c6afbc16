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


def served(*answers: str | None, **question) -> Group:
    """A group whose samples differ in their answers and in a log-probability."""
    trajectories = []
    for i, answer in enumerate(answers):
        said = f"<answer>{answer}</answer>"
        log_probs = [-0.1, -0.2, -0.3 - i / 10]
        turns = [
            Turn(role="user", tokens=[1, 2]),
            Turn(role="assistant", text=said, tokens=[3, 4, 5], log_probs=log_probs),
        ]
        stop = StopReason.ANSWER if answer is not None else StopReason.LENGTH
        trajectories.append(
            Trajectory(
                id=f"t{i}", question_id="q1", group_id="g1", turns=turns, answer=answer, stop_reason=stop,
                images=[ImageView(id="img0", uri="data:image/png;base64,AAAA")], policy_version=3,
                rewards={"accuracy": 1.0}, reward=9.0, advantage=4.0,
            )
        )  # fmt: skip
    row = Question(id="q1", question="which digit?", **question)
    return Group(id="g1", question=row, trajectories=trajectories, policy_version=3)


def task_of(group: Group, verdict: Verdict | None = None, gate: float = 0.6, **more) -> UpdateTask | None:
    verdict = verdict or majority([t.answer for t in group.trajectories])
    return make_task(group, verdict, EvolutionConfig(gate=gate), RewardsConfig(), **more)


@pytest.mark.parametrize(
    ("answers", "elected", "confidence", "reason"),
    [
        (["7", "7", "8", None], "7", 0.5, ""),
        (["a"] * 4 + ["b", "c"], "a", pytest.approx(0.667, abs=1e-3), ""),
        ([" New  York", "new york", "Paris", "NEW YORK"], " New  York", 0.75, ""),  # as first spelt
        (["8", "7", "7", "8"], "8", 0.5, TIE),
    ],
)
def test_the_majority_of_all_samples_is_elected(answers, elected, confidence, reason) -> None:
    verdict = majority(answers)
    assert (verdict.answer, verdict.confidence, verdict.reason) == (elected, confidence, reason)
    assert [v.answer for v in verdict.votes] == answers
    assert gate(verdict, EvolutionConfig(gate=0.0)) is (reason == "")
    assert gate(verdict, EvolutionConfig(gate=0.0, enabled=False)) is False


def test_a_task_scores_each_sample_by_its_own_answer() -> None:
    group = served("7", "7", " 7", "7", "8", None)
    task = task_of(group, now=12.0)
    assert [t.rewards["accuracy"] for t in task.trajectories] == [1, 1, 1, 1, 0, 0]
    assert [t.reward for t in task.trajectories] == [1, 1, 1, 1, 0, 0]
    assert (task.pseudo_label, task.confidence, task.created_at) == ("7", pytest.approx(4 / 6), 12.0)
    # The caller's picture does not travel k times
    assert all(t.images[0].uri == "" for t in task.trajectories)
    assert [t.token_ids() for t in task.trajectories] == [t.token_ids() for t in group.trajectories]
    assert UpdateTask.model_validate_json(task.model_dump_json()) == task
    assert task_of(group, gate=0.7) is None


def test_options_are_part_of_the_question_not_of_its_truth() -> None:
    meta = {"options": ["5", "7"], "truth": "A"}
    group = served("(B) 7", "B", "b.", "A", scorer="mc_letter", meta=meta)
    task = task_of(group, Verdict(answer="7", confidence=0.75, strategy="majority"))
    assert [t.reward for t in task.trajectories] == [1, 1, 1, 0]


def test_relabel_scores_again_and_keeps_the_rest() -> None:
    group = served("7", "7", "7", "8")
    task = task_of(group, now=1.0, experience_id="exp_1")
    corrected = relabel(task, group.question, " 8", RewardsConfig())
    assert [t.reward for t in corrected.trajectories] == [0, 0, 0, 1]
    assert (corrected.id, corrected.pseudo_label, corrected.confidence) == (task.id, " 8", 0.75)
    assert relabel(corrected, group.question, "7", RewardsConfig()) == task
    with pytest.raises(BadInput, match="blank"):
        relabel(task, group.question, "  ", RewardsConfig())


def test_a_task_becomes_the_learners_group() -> None:
    unit = as_group(task_of(served("7", "7", "7", "8", answers=["7"])))
    assert (unit.id, unit.policy_version, len(unit.trajectories)) == ("g1", 3, 4)
    assert (unit.question.answers, unit.question.media) == (None, [])


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
