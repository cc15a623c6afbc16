"""Rehearsal on a real cluster."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from PIL import Image
from placed_actors import wait_until
from ray.actor import ActorHandle
from test_evolution import names, submit

from pixelis.actors.evolution import Evolution
from pixelis.actors.group_views import UpdatePictures, fetch
from pixelis.actors.memory_shard import MemoryShard
from pixelis.actors.policy_store import PolicyStore
from pixelis.actors.update_queue import QueuedTask, Rehearsal, as_task, within_share
from pixelis.config import EvolutionConfig, load
from pixelis.evolution.updates import agreeing
from pixelis.memory import Entry
from pixelis.records import Experience, Feedback, ImageView, Question, Trajectory, Turn, Verdict

pytestmark = pytest.mark.slow
PICTURE = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)


def entry(name: str, user: str = "anna", tokens: bool = True, pictures: bool = True) -> Entry:
    answer = Turn(role="assistant", text="7")
    if tokens:
        answer = answer.model_copy(update={"tokens": [4], "log_probs": [-0.5]})
    turns = [Turn(role="user", text="which?", tokens=[1, 2], images=["img0"]), answer]
    seen: dict[str, Any] = {"id": f"traj-{name}", "question_id": name, "images": [ImageView(id="img0")]}
    experience = Experience(
        id=name,
        question=Question(id=name, question="which?"),
        trajectory=Trajectory(turns=turns, answer="7", advantage=1.0, **seen),
        verdict=Verdict(answer="7", confidence=0.75, strategy="majority"),
        policy_version=0,
        created_at=time.time(),
        user=user,
    )
    out = io.BytesIO()
    Image.fromarray(PICTURE).save(out, "PNG")
    return Entry(experience, None, {"img0": out.getvalue()} if pictures else {})


@pytest.fixture
def placed(ray_cluster: None, tmp_path: Path) -> Iterator[tuple[ActorHandle, ActorHandle]]:
    """An Evolution that rehearses up to four experiences an update, and its memory."""
    own = [f"run.dir={tmp_path}", "evolution.batch=2", "evolution.per_minute=6000", "memory.shards=1"]
    own += ["evolution.canary.enabled=false", "evolution.objective=answer", "evolution.rehearse=4"]
    config = load(None, own)
    shard = MemoryShard.options(name="rehearsal-shard").remote(config, 0)
    store = PolicyStore.remote(str(tmp_path))
    evolution = Evolution.remote(config, [], store, memory=["rehearsal-shard"])
    ray.get(evolution.begin.remote(0, {"base": 0}, 0))
    yield evolution, shard
    for actor in (evolution, shard, store):
        ray.kill(actor)


def update(evolution: ActorHandle, step: int) -> Any:
    """The batch of an update with two new tasks."""
    submit(evolution, f"new-{step}-a", f"new-{step}-b")
    batch = ray.get(evolution.next_batch.remote(0, 1, step), timeout=60)
    wait_until(lambda: ray.get(evolution.__ray_call__.remote(lambda self: self.rehearsal.drawing.done())))
    ray.get(evolution.step_done.remote(step, None))
    return batch


def test_what_was_learnt_is_rehearsed_until_it_is_deleted_or_called_wrong(
    placed: tuple[ActorHandle, ActorHandle],
) -> None:
    evolution, shard = placed
    known = [entry(name) for name in ("a", "b", "wrong", "new")]
    known += [entry("bare", pictures=False), entry("redacted", tokens=False)]
    ray.get(shard.add.remote(known))
    ray.get(shard.learnt.remote([e.experience.id for e in known if e.experience.id != "new"]))
    ray.get(shard.feedback.remote("wrong", Feedback(correct=False)))

    first = update(evolution, 0)  # nothing was drawn before the first batch
    assert (names(first), first.metrics["evolve/rehearsed"]) == (["new-0-a", "new-0-b"], 0)
    second = update(evolution, 1)
    assert names(second)[:2] == ["new-1-a", "new-1-b"]
    assert sorted(names(second)[2:]) == ["a", "b"]
    assert (second.metrics["evolve/rehearsed"], second.metrics["evolve/tasks"]) == (2, 2)
    for group, views in list(zip(second.groups, fetch(second.views), strict=True))[2:]:
        (trajectory,) = agreeing(group.trajectories, group.question.meta["pseudo_label"])
        assert trajectory.advantage is None, (
            "its log-probabilities are of older weights: no part of the KL divergence"
        )
        np.testing.assert_array_equal(views[trajectory.id][0], PICTURE)

    ray.get(evolution.feedback.remote("a", Feedback(correct=False)))
    ray.get(evolution.forget.remote(["b"]))
    assert names(update(evolution, 2)) == ["new-2-a", "new-2-b"]
    assert "b" not in names(update(evolution, 3)), "the memory had it for longer: it is deleted there last"


def test_answers_of_a_withdrawn_version_are_dropped() -> None:
    rehearsal = Rehearsal(EvolutionConfig(), None, UpdatePictures())
    for withdrawn, count in ({0}, 0), ({1}, 1):
        rehearsal.items = [QueuedTask(as_task(entry("a").experience), {}, "")]
        assert len(rehearsal.take(withdrawn, ())) == count
        assert rehearsal.take(withdrawn, ()) == []


def test_no_user_has_more_than_its_share() -> None:
    drawn: list[Experience] = [
        entry(f"{user}{i}", user).experience for i in range(4) for user in ("anna", "bert")
    ]
    drawn += [entry("c0", "carla").experience]
    chosen = within_share(drawn, 4, 0.25)
    assert [e.id for e in chosen] == ["anna0", "bert0", "c0"]
    assert len(within_share(drawn, 4, 1.0)) == 4


@pytest.mark.parametrize(
    "overrides",
    [["evolution.objective=policy"], ["evolution.objective=answer", "memory.pictures=false"]],
    ids=["no answers are imitated", "no pictures are stored"],
)
def test_rehearsal_that_cannot_be_had_is_refused(overrides: list[str]) -> None:
    with pytest.raises(Exception, match="rehearse"):
        load(None, ["evolution.rehearse=8", *overrides])
