"""The review queue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from pixelis.config import EvolutionConfig, RewardsConfig
from pixelis.errors import BadInput, InfraFailure
from pixelis.evolution.review_queue import ReviewQueue
from pixelis.evolution.updates import make_task
from pixelis.records import (
    Feedback,
    Group,
    ImageView,
    Media,
    Question,
    StopReason,
    Trajectory,
    Turn,
    UpdateTask,
    Verdict,
)
from pixelis.rewards.vote import majority

PNG = b"\x89PNG not really"
MEDIA = [Media(id="img0", uri="data:image/png;base64,AAAA", width=4, height=3)]
QUESTION = Question(id="q1", question="which digit?", media=MEDIA, answers=["8"], meta={"truth": "8"})


def update(number: int = 0, answers: str = "7778", experience_id: str = "") -> tuple[UpdateTask, Verdict]:
    def sample(place: int, answer: str) -> Trajectory:
        text = f"<answer>{answer}</answer>"
        turn = Turn(role="assistant", text=text, tokens=[3, 4], log_probs=[-0.1, -0.25])
        images = [ImageView(id="img0"), ImageView(id="obs1", parent="img0")]
        ids = {"id": f"t{number}_{place}", "question_id": "q1", "group_id": "g1"}
        return Trajectory(**ids, images=images, turns=[turn], answer=answer, stop_reason=StopReason.ANSWER)

    verdict = majority(list(answers))
    group = Group(id="g1", question=QUESTION, trajectories=[sample(*item) for item in enumerate(answers)])
    config, now = EvolutionConfig(gate=0.5), 100.0 + number
    task = make_task(group, verdict, config, RewardsConfig(), now=now, experience_id=experience_id)
    assert task is not None
    return task, verdict


def views(task: UpdateTask, seed: int = 0) -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 256, (30, 40, 3)).astype(np.uint8)
    return {
        t.id: [shared, rng.integers(0, 256, (5 + i, 7, 3)).astype(np.uint8)]
        for i, t in enumerate(task.trajectories)
    }


@pytest.fixture
def queue(tmp_path: Path) -> ReviewQueue:
    return ReviewQueue(tmp_path / "review.db")


def reopened(queue: ReviewQueue) -> ReviewQueue:
    queue.close()
    return ReviewQueue(queue.path)


def put(queue: ReviewQueue, number: int = 0, experience_id: str = "") -> str:
    task, verdict = update(number, experience_id=experience_id)
    assert queue.put(task, verdict, QUESTION, {"img0": PNG}, views(task, number))
    return task.id


def test_a_stored_review_reads_back(queue: ReviewQueue) -> None:
    task, verdict = update()
    assert queue.put(task, verdict, QUESTION, {"img0": PNG, "obs1": PNG}, views(task))
    assert not queue.put(task, verdict, QUESTION, {}, views(task))
    queue = reopened(queue)
    review = queue.get(task.id)
    assert queue.reviews() == [review]
    assert (review.id, review.verdict, review.state, queue.waiting()) == (task.id, verdict, "waiting", 1)
    assert [t.token_ids() for t in review.task.trajectories] == [[]] * 4
    assert [t.turns[0].text for t in review.task.trajectories] == [t.turns[0].text for t in task.trajectories]
    assert review.question.question == "which digit?"
    assert "AAAA" not in review.model_dump_json()
    # Nothing tells the truth here either
    assert (review.question.answers, review.question.meta) == (None, {})
    assert queue.pictures(task.id) == {"img0": PNG, "obs1": PNG}
    stored = queue.views(task.id)
    for name, arrays in views(task).items():
        assert all(
            np.array_equal(a, b) and b.dtype == np.uint8 for a, b in zip(arrays, stored[name], strict=True)
        )
    assert (queue.get("task_x"), queue.pictures("task_x"), queue.views("task_x")) == (None, {}, {})


def test_shared_views_are_stored_once(queue: ReviewQueue) -> None:
    put(queue, 0)
    size = queue.stats()["picture_bytes"]
    assert size < 2 * 30 * 40 * 3
    task, verdict = update(1)
    queue.put(task, verdict, QUESTION, {"img0": PNG}, views(task, 0))
    assert queue.stats()["picture_bytes"] == size


def test_approving_returns_the_task_once_and_rejecting_none(queue: ReviewQueue) -> None:
    id, other = put(queue), put(queue, 1)
    task = queue.decide(id, "approved", "ann", "fine", now=160.0)
    # Tokens and log-probs to the bit
    assert task.model_dump(exclude={"id"}) == update()[0].model_dump(exclude={"id"})
    assert queue.decide(id, "approved", "bob") is None  # a retry teaches nothing a second time
    review = queue.reviews("approved")[0]
    assert (review.reviewer, review.comment, review.decided_at) == ("ann", "fine", 160.0)
    for _ in range(2):
        assert queue.decide(other, "rejected", "ann", now=160.0) is None
    for decided, decision, answer in (
        (id, "rejected", None),
        (id, "approved", "8"),
        (other, "approved", None),
    ):
        with pytest.raises(BadInput, match="already") as error:
            queue.decide(decided, decision, "bob", answer=answer)
        assert (error.value.code, error.value.fix is not None) == ("already_decided", True)
    assert queue.reviews() == []
    assert (queue.stats()["rejected"], queue.stats()["waiting"]) == (1, 0)


def test_a_reviewers_answer_becomes_the_label(tmp_path: Path) -> None:
    queue = ReviewQueue(tmp_path / "review.db", RewardsConfig(weights={"accuracy": 2.0}))
    id = put(queue)
    task = queue.decide(id, "approved", "ann", answer=" 8 ")
    assert (task.pseudo_label, [t.reward for t in task.trajectories]) == ("8", [0, 0, 0, 2])
    assert queue.decide(id, "approved", "ann", answer="8") is None
    assert queue.stats()["corrected"] == 1
    confirmed = queue.decide(put(queue, 1), "approved", "ann", answer="7")
    assert [t.reward for t in confirmed.trajectories] == [1, 1, 1, 0]


def test_bad_decisions_change_nothing(queue: ReviewQueue) -> None:
    id = put(queue)
    with pytest.raises(BadInput) as error:
        queue.decide("task_x", "approved", "ann")
    assert error.value.code == "unknown_review"
    for token in ("<|im_end|>", "<|vision_start|>", "</answer>", "<TOOL_CALL>", '<think x="1">'):
        with pytest.raises(BadInput) as error:
            queue.decide(id, "approved", "ann", answer=f"7{token}")
        assert error.value.code == "control_token"
    assert queue.waiting() == 1


def test_due_lists_updates_that_waited_long_enough(queue: ReviewQueue) -> None:
    ids = [put(queue, number) for number in (2, 0, 1)]  # made at 102, 100 and 101
    assert queue.due(161.0, 60.0) == [ids[1], ids[2]]
    queue.decide(ids[1], "rejected", "ann")
    assert queue.due(1e9, 60.0) == [ids[2], ids[0]]
    assert [r.id for r in queue.reviews(limit=1)] == [ids[2]]
    assert len(queue.reviews(None)) == 3


def test_a_review_that_feedback_disputes_waits_for_a_person(queue: ReviewQueue, tmp_path: Path) -> None:
    disputed, other = put(queue, 0, "exp_0"), put(queue, 1, "exp_1")
    assert queue.dispute("exp_0", Feedback(answer="7")) == 0, "feedback that confirms the label"
    assert queue.dispute("exp_0", Feedback(correct=False)) == 1
    queue = reopened(queue)
    assert queue.due(1e9, 60.0) == [other]
    (first, _) = queue.reviews()
    assert (first.id, first.state, first.comment) == (disputed, "waiting", "feedback calls the answer wrong")
    assert queue.decide(disputed, "approved", "ann") is not None
    assert (tmp_path / "review.db").stat().st_mode & 0o777 == 0o600


def test_forget_removes_the_pictures_too(queue: ReviewQueue, tmp_path: Path) -> None:
    secret = b"PICTURE-OF-SOMEBODY"
    task, verdict = update(0, experience_id="exp_1")
    queue.put(task, verdict, QUESTION, {"img0": secret}, views(task))
    other = put(queue, 1, experience_id="exp_2")
    assert queue.forget(["exp_1", "", "exp_9"]) == 1
    assert [r.id for r in queue.reviews()] == [other]
    assert len(queue.views(other)) == 4
    assert secret not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    queue.decide(other, "approved", "ann", now=200.0)
    assert (queue.prune(150.0), queue.prune(201.0)) == (0, 1)
    assert queue.stats()["picture_bytes"] == 0


def test_a_decision_removes_old_reviews(tmp_path: Path) -> None:
    queue = ReviewQueue(tmp_path / "review.db", keep_days=1)
    ids = [put(queue, number) for number in range(3)]
    queue.decide(ids[0], "rejected", "ann", now=1000.0)
    queue.decide(ids[1], "rejected", "ann", now=1000.0 + 86_401)
    assert {review.id for review in queue.reviews(None)} == set(ids[1:])


def test_an_approved_task_is_kept_until_done(queue: ReviewQueue) -> None:
    first, second, third = (put(queue, number) for number in range(3))
    tasks = [
        queue.decide(id, "approved", "ann", answer=answer) for id, answer in ((second, "8"), (first, None))
    ]
    queue.decide(third, "rejected", "ann")
    queue = reopened(queue)
    assert queue.approved() == [second, first]
    assert [queue.task(id) for id in queue.approved()] == tasks, "with the correction, tokens and log-probs"
    assert all(len(arrays) == 2 for arrays in queue.views(second).values())
    queue.done([second, third, "no review"])
    assert (queue.approved(), queue.task(second), queue.task(third)) == ([first], None, None)


@pytest.mark.parametrize("decision", ["approved", "rejected"])
def test_personal_data_is_redacted_and_removed_when_done(
    queue: ReviewQueue, tmp_path: Path, decision: Literal["approved", "rejected"]
) -> None:
    task, verdict = update()
    for trajectory in task.trajectories:
        trajectory.turns[0].text = "mail ann.smith@example.org now"
    queue.put(task, verdict, QUESTION, {}, views(task))
    review = queue.get(task.id)
    assert "example.org" not in review.model_dump_json()
    approved = queue.decide(task.id, decision, "ann", "ask bob@example.org")
    assert approved == (task if decision == "approved" else None)
    queue.done([task.id] if approved else [])
    assert "example.org" not in queue.reviews(None)[0].model_dump_json()
    assert b"example.org" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "review.db").write_bytes(b"no database " * 100)
    with pytest.raises(InfraFailure, match=r"review\.db failed"):
        ReviewQueue(tmp_path / "review.db")


WRITER = """
import sys
sys.path.insert(0, {tests!r})
from test_review_queue import put
from pixelis.evolution.review_queue import ReviewQueue
queue = ReviewQueue({path!r})
for number in range(10_000):
    id = put(queue, number)
    print("put", id, flush=True)
    if number % 2:
        queue.decide(id, "approved", "ann")
        print("approved", id, flush=True)
"""


@pytest.mark.slow
@pytest.mark.long
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "review.db"
    code = WRITER.format(tests=str(Path(__file__).parent), path=str(path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as writer:
        lines = [writer.stdout.readline().split() for _ in range(31)]
        os.kill(writer.pid, signal.SIGKILL)
        lines += [line.split() for line in writer.stdout if line.endswith("\n")]
    queue = ReviewQueue(path)
    states = {review.id: review.state for review in queue.reviews(None, 20_000)}
    assert all(id in states for word, id in lines if word == "put")
    assert all(states[id] == "approved" for word, id in lines if word == "approved")
    assert {id for word, id in lines if word == "approved"} <= set(queue.approved())
    assert all(len(queue.views(id)) == 4 for id in states)  # whole or not at all
