"""Replay of learnt update tasks: what is drawn again, how often, and what never is."""

from __future__ import annotations

from collections import Counter

from pixelis.actors.update_queue import QueuedTask, UpdateQueue
from pixelis.config import parse
from pixelis.records import StopReason, Trajectory, Turn, UpdateTask


def queue_of(tasks: int, users: int = 8, **settings: object) -> UpdateQueue:
    """A queue with tasks of users who take turns."""
    evolution = {"batch": 4, "replay": 2, "objective": "answer", "max_share_per_user": 0.5} | settings
    queue = UpdateQueue(parse({"evolution": evolution}), Counter())
    for number in range(tasks):
        turn = Turn(role="assistant", tokens=[1, 2], log_probs=[-0.1, -0.1])
        trajectory = Trajectory(
            id=f"t{number}", question_id=f"q{number}", turns=[turn], answer="7", stop_reason=StopReason.ANSWER, advantage=0.0
        )
        task = UpdateTask(
            question_id=f"q{number}",
            trajectories=[trajectory],
            pseudo_label="7",
            confidence=0.9,
            created_at=0.0,
            experience_id=f"e{number}",
            user=f"u{number % users}",
        )
        queue.push(QueuedTask(task, {}, f"q{number}"))
    return queue


def names(items: list[QueuedTask]) -> list[str]:
    return [item.task.experience_id for item in items]


def learn(queue: UpdateQueue, items: list[QueuedTask]) -> list[str]:
    """The learner applies a batch."""
    assert len(queue.batch(items, 1, 0.01).groups) == len(items)
    queue.learn(items)
    return names(items)


def test_batches_of_learnt_tasks_follow_each_new_one() -> None:
    queue = queue_of(8)
    assert queue.replay() == []
    first = learn(queue, queue.take(4))
    assert first == ["e0", "e1", "e2", "e3"]
    assert sorted(learn(queue, queue.replay())) == sorted(learn(queue, queue.replay())) == first
    assert queue.replay() == []
    second = learn(queue, queue.take(4))
    drawn = learn(queue, queue.replay())
    assert set(drawn) <= {*first, *second}
    assert len(set(drawn)) == 4
    assert queue.counts["handed"] == 8


def test_nothing_is_kept_without_replay() -> None:
    queue = queue_of(8, replay=0)
    learn(queue, queue.take(4))
    assert queue.replay() == []
    assert not queue.learnt


def test_deleted_and_disowned_tasks_are_never_drawn_again() -> None:
    queue = queue_of(8)
    learn(queue, queue.take(4))
    handed = queue.take(4)
    queue.forget(lambda item: item.task.experience_id in ("e1", "e6"))  # learnt, and with the learner right now
    learn(queue, handed)
    drawn = {name for _ in range(2) for name in learn(queue, queue.replay())}
    assert drawn <= {"e0", "e2", "e3", "e4", "e5", "e7"}
    assert {"e1", "e6"}.isdisjoint(names(list(queue.learnt)))


def test_a_skipped_update_is_not_replayed() -> None:
    queue = queue_of(8)
    queue.take(4)  # which the KL guard undoes
    assert queue.replay() == []
    learn(queue, queue.take(4))
    assert sorted(names(queue.replay())) == ["e4", "e5", "e6", "e7"]


def test_a_replay_keeps_to_the_share_of_a_user() -> None:
    queue = queue_of(4, users=4)
    learn(queue, queue.take(4))
    for number, item in enumerate(queue.learnt):
        item.task.user = "u0" if number < 3 else "u1"  # three of four are one user's, who may have half
    assert queue.replay() == []


def test_at_most_as_many_learnt_tasks_as_the_queue_holds_are_kept() -> None:
    queue = queue_of(16, queue=8)  # which drops half of them
    for _ in range(2):
        learn(queue, queue.take(4))
    assert len(queue.learnt) == 8
