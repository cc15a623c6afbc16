"""objective=answer: what an update learns from when the elected answer is learnt in every sample's own episode."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_train_step import trainer

from pixelis.actors.batch_sources import UpdateSource
from pixelis.actors.update_queue import QueuedTask, UpdateQueue
from pixelis.actors.weights import CandidatePublisher
from pixelis.config import parse
from pixelis.errors import DataFailure
from pixelis.evolution.updates import as_group, elected
from pixelis.policy.samples import LearnerBatch
from pixelis.records import StopReason, Trajectory, Turn, UpdateTask

TOKENS = {"7": 70, "8": 80, "9": 90}


def episode(number: int, answer: str | None) -> Trajectory:
    """Prompt, a call, its observation, and an answer of two tokens; or no answer."""
    turns = [
        Turn(role="user", tokens=[1, 2]),
        Turn(role="assistant", tokens=[10 + number, 3], log_probs=[-0.1, -0.2]),
        Turn(role="tool", tokens=[4]),
    ]
    if answer is not None:
        turns.append(Turn(role="assistant", tokens=[TOKENS[answer], 5], log_probs=[-0.3, -0.4]))
    stop = StopReason.LENGTH if answer is None else StopReason.ANSWER
    return Trajectory(id=f"t{number}", question_id="q", group_id="g", turns=turns, answer=answer, stop_reason=stop, advantage=0.0)


def task(answers: list[str | None], label: str) -> UpdateTask:
    episodes = [episode(i, answer) for i, answer in enumerate(answers)]
    return UpdateTask(question_id="q", trajectories=episodes, pseudo_label=label, confidence=0.8, created_at=0.0)


@given(st.lists(st.sampled_from(["7", "8", "9", None]), max_size=8), st.sampled_from(["7", "8"]))
def test_every_answered_episode_ends_with_the_elected_answer(answers: list[str | None], label: str) -> None:
    original = task(answers, label)
    result = elected(original.trajectories, label)
    assert [t.id for t, _ in result] == ([f"t{i}" for i, a in enumerate(answers) if a is not None] if label in answers else [])
    for trajectory, agreed in result:
        own = original.trajectories[int(trajectory.id[1:])]
        assert trajectory.turns[:-1] == own.turns[:-1]
        assert (trajectory.answer, trajectory.turns[-1].tokens) == (label, [TOKENS[label], 5])
        assert agreed == (own.answer == label)
        if agreed:
            assert trajectory == own


def test_a_corrected_answer_that_no_sample_gave_is_left_out() -> None:
    counts: Counter[str] = Counter()
    for objective, labels in (("policy", ["8", "7"]), ("answer", ["7"])):
        queue = UpdateQueue(parse({"evolution": {"batch": 2, "objective": objective}}), counts)
        for label in ("8", "7"):
            labelled = task(["7", "7", "9"], label)
            for trajectory in labelled.trajectories:
                trajectory.reward = float(trajectory.answer == label)
            if queue.usable(labelled):
                queue.push(QueuedTask(labelled, None, f"q-{label}"))  # type: ignore[arg-type]
        assert [item.task.pseudo_label for item in queue.items] == labels


def test_traffic_without_a_usable_sample_does_not_end_the_learner() -> None:
    options = {"lr": 1e-3, "kl_weight": 0.0, "kl_limit": 0.1, "sampled": []}
    with trainer() as own:
        before = own.adapter().sha256()
        assert own.step(LearnerBatch(0, [], "sft", options=options, optional=True)) == {"evolve/skipped": 1.0}
        assert own.adapter().sha256() == before
        with pytest.raises(DataFailure, match="no usable sample"):
            own.step(LearnerBatch(0, [], "sft", options=options))


def test_weights_of_answer_and_calls() -> None:
    group = as_group(task(["7", "8", None], "7"))
    settings = parse({"evolution": {"objective": "answer", "call_weight": 0.25}})
    source = UpdateSource(settings, None, CandidatePublisher(None, 1))  # type: ignore[arg-type]
    agreed, other = source._elected([group], [{f"t{i}": [] for i in range(3)}])
    assert agreed.tokens.tolist() == [1, 2, 10, 3, 4, 70, 5]
    assert other.tokens.tolist() == [1, 2, 11, 3, 4, 70, 5]
    np.testing.assert_allclose(agreed.weights, [0, 0, 0.25, 0.25, 0, 1, 1])
    np.testing.assert_allclose(other.weights, [0, 0, 0, 0, 0, 1, 1])
