"""The journal of updates: what it returns, repeats, deletes and expires."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pixelis.errors import InfraFailure
from pixelis.evolution.journal import Journal, JournalTask
from pixelis.records import ImageView, Trajectory, Turn, UpdateTask

PICTURE = np.arange(6 * 5 * 3, dtype=np.uint8).reshape(6, 5, 3)


def item(name: str, rehearsed: bool = False) -> JournalTask:
    turns = [
        Turn(role="user", tokens=[1], images=["img0"]),
        Turn(role="assistant", tokens=[2], log_probs=[-0.1]),
    ]
    trajectory = Trajectory(id=f"t-{name}", question_id=name, images=[ImageView(id="img0")], turns=turns)
    task = UpdateTask(
        id=f"task-{name}",
        question_id=name,
        trajectories=[trajectory],
        pseudo_label="7",
        confidence=0.1 + 0.2,
        created_at=1e9 / 3,
        experience_id=name,
    )
    return JournalTask(task, {trajectory.id: [PICTURE, PICTURE[:2]]}, rehearsed)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "updates.db")


def chain(journal: Journal, *groups: str, start: int | None = None, now: float = 0.0) -> list[int]:
    """Updates one after the other, of tasks with one-letter names, a second apart."""
    ids = list[int]()
    for number, names in enumerate(groups):
        parent = ids[-1] if ids else start
        origin = 0 if parent is None else None
        ids.append(
            journal.add(parent, origin, number, {"lr": 0.1 + 0.2}, list(map(item, names)), now + number)
        )
    return ids


def last(journal: Journal, ids: list[int]):  # type: ignore[no-untyped-def]
    return journal.get(ids[-1])


def test_tasks_come_back_as_they_were(journal: Journal) -> None:
    id = journal.add(None, 3, 7, {"lr": 0.1 + 0.2}, [item("b"), item("a", rehearsed=True)])
    journal.close()
    journal = Journal(journal.path)
    stored = journal.tasks(id)
    assert [(s.task, s.rehearsed) for s in stored] == [(item("b").task, False), (item("a").task, True)]
    for entry in stored:
        (views,) = entry.views.values()
        assert [view.tobytes() for view in views] == [PICTURE.tobytes(), PICTURE[:2].tobytes()]
        assert views[0].shape == PICTURE.shape
    update = journal.get(id)
    assert update is not None
    assert (update.origin, update.step, update.options) == (3, 7, {"lr": 0.1 + 0.2})


def test_equal_pictures_are_stored_once(journal: Journal) -> None:
    chain(journal, "abc", "def")
    assert journal._rows("SELECT count(*) AS n FROM blobs")[0]["n"] == 2
    journal.forget(list("abcdef"))
    assert journal._rows("SELECT count(*) AS n FROM blobs")[0]["n"] == 0


def test_a_repetition_begins_at_the_last_complete_checkpoint_before_what_was_deleted(
    journal: Journal,
) -> None:
    ids = chain(journal, "a", "b", "xc", "x", "d")
    assert journal.repetition(last(journal, ids), lambda name: True) is None
    for place in (0, 1, 3):
        journal.set_checkpoint(ids[place], f"c{place}")
    assert journal.forget(["x"]) == 2
    for complete, start in (("c0", "c1"), ids[1]), (("c0",), ids[0]), ((), None):
        repetition = journal.repetition(last(journal, ids), complete.__contains__)
        assert repetition is not None
        assert (repetition.start and repetition.start.id) == start
        after = ids if start is None else ids[ids.index(start) + 1 :]
        assert [u.id for u in repetition.path] == after
        assert [u.id for u, _ in repetition.updates] == [id for id in after if id != ids[3]]
        assert repetition.origin == (0 if start is None else None)
        assert repetition.updates[0][1] == (start is None)


def test_a_fresh_optimizer_stays_where_its_update_is_left_out(journal: Journal) -> None:
    ids = chain(journal, "a", "b")
    journal.set_version(ids[0], 5)
    reset = journal.add(ids[0], 5, 2, {}, [item("x")])
    after = chain(journal, "c", start=reset)
    journal.forget(["x"])
    repetition = journal.repetition(last(journal, after), lambda name: False)
    assert repetition is not None
    assert [(u.id, fresh) for u, fresh in repetition.updates] == [(ids[0], True), (after[0], True)]


def test_the_learners_position_skips_updates_that_it_lost(journal: Journal) -> None:
    ids = chain(journal, "a", "b", "c")
    assert [getattr(journal.last_before(n), "id", None) for n in (0, 1, 2, 3, 9)] == [None, *ids, ids[2]]


def test_old_updates_go_with_those_up_to_the_next_checkpoint(journal: Journal) -> None:
    ids = chain(journal, "a", "b", "c", "d")
    with journal._transaction():  # the learner was reset before the update that becomes the first
        journal.store.execute("UPDATE updates SET origin = 4 WHERE id = ?", (ids[2],))
    aside = chain(journal, "e", start=ids[0])
    journal.set_checkpoint(ids[0], "first")
    journal.set_checkpoint(ids[2], "second")
    assert journal.expire(last(journal, ids), before=-1) == []
    assert journal.expire(last(journal, ids), before=1.5) == ["first"]
    path = journal.ancestry(last(journal, ids))
    assert [(u.id, u.tasks) for u in path] == [(ids[2], 0), (ids[3], 1)]
    assert journal.get(aside[0]) is None
    journal.forget(["d"])
    repetition = journal.repetition(last(journal, ids), lambda name: True)
    assert repetition is not None
    assert (repetition.start and repetition.start.id, repetition.updates) == (ids[2], [])
    without = journal.repetition(last(journal, ids), lambda name: False)
    assert without is not None
    assert (without.start, without.origin) == (None, None), "a lost checkpoint is no other beginning"


def test_what_is_older_than_the_retention_goes_without_a_checkpoint_too(journal: Journal) -> None:
    ids = chain(journal, "a", "b", "c")
    journal.expire(last(journal, ids), before=1.5)
    assert [u.id for u in journal.ancestry(last(journal, ids))] == [ids[2]]
    journal.forget(["c"])
    repetition = journal.repetition(last(journal, ids), lambda name: True)
    assert repetition is not None
    assert (repetition.start, repetition.origin) == (None, None), "nothing to begin from"


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "updates.db").write_bytes(b"no database " * 100)
    with pytest.raises(InfraFailure, match=r"updates\.db failed"):
        Journal(tmp_path / "updates.db")
