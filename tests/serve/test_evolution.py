"""The Evolution actor on a real cluster: order, shares, drain, judgement of versions, and what happens when others misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError
from scripted import ScriptedGenerator

from pixelis.actors.evolution import Evolution
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import load
from pixelis.policy.adapters import Adapter
from pixelis.records import StopReason, Trajectory, Turn, UpdateTask

pytestmark = pytest.mark.slow


def task(name: str, rewards: tuple[float | None, ...] = (1.0, 1.0, 0.0)) -> UpdateTask:
    trajectories = [
        Trajectory(
            id=f"{name}-{i}",
            question_id=name,
            group_id=f"group-{name}",
            turns=[Turn(role="user", tokens=[1]), Turn(role="assistant", tokens=[2, 3], log_probs=[-0.1, -0.2])],
            answer="7",
            stop_reason=StopReason.ANSWER,
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    ]
    return UpdateTask(question_id=name, trajectories=trajectories, pseudo_label="7", confidence=0.75, created_at=0.0)


class Placed:
    """An Evolution actor with a real store and, unless they are given, no generators."""

    def __init__(
        self, folder: Path, *overrides: str, generators: tuple[ActorHandle, ...] = (), canary: ActorHandle | None = None
    ):
        own = [f"run.dir={folder}", "evolution.batch=4", "evolution.queue=6", "evolution.per_minute=6000"]
        own.append(f"evolution.canary.enabled={canary is not None}".lower())
        self.config = load(None, [*own, *overrides])
        self.store = PolicyStore.remote(str(folder))
        self.actor = Evolution.remote(self.config, list(generators), self.store, canary)

    def publish(self, value: float, promote: bool = False) -> int:
        tensors = {"layer.A": np.full((2, 3), value, np.float32), "layer.B": np.full((4, 2), value, np.float32)}
        return ray.get(self.store.publish.remote(Adapter(tensors, 2, 2, "base"), "evolve", 0, {}, promote))

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return ray.get(getattr(self.actor, method).remote(*arguments, **named), timeout=30)

    def end(self) -> None:
        ray.kill(self.actor)
        ray.kill(self.store)


@pytest.fixture
def place(ray_cluster: None, tmp_path: Path) -> Iterator[Callable[..., Placed]]:
    placed: list[Placed] = []

    def make(*overrides: str, **actors: Any) -> Placed:
        placed.append(Placed(tmp_path, *overrides, **actors))
        return placed[-1]

    yield make
    for one in placed:
        one.end()


@pytest.fixture
def evolution(place: Callable[..., Placed]) -> ActorHandle:
    actor = place().actor
    ray.get(actor.begin.remote(0, {"base": 0}, 0))
    return actor


def submit(actor: ActorHandle, *names: str, **options: Any) -> list[bool]:
    views = ray.put({})
    return [ray.get(actor.submit.remote(task(name, **options), [views])) for name in names]  # one by one: order counts here


def names(batch: Any) -> list[str]:
    return [group.question.id for group in batch.groups]


def test_ranks_share_a_batch_and_steps_follow_each_other(evolution: ActorHandle) -> None:
    waiting = [evolution.next_batch.remote(rank, 2, 0) for rank in range(2)]
    assert ray.wait(waiting, timeout=0.3)[0] == []
    submit(evolution, "a", "b", "c", "d", "e")
    first, second = ray.get(waiting, timeout=10)
    assert (names(first), names(second)) == (["a", "c"], ["b", "d"])
    assert first.metrics == second.metrics
    assert (first.metrics["evolve/tasks"], first.metrics["evolve/confidence"], first.metrics["evolve/uniform"]) == (4, 0.75, 0)
    later = evolution.next_batch.remote(0, 1, 1)
    submit(evolution, "f", "g", "h")
    assert ray.wait([later], timeout=0.3)[0] == []  # step 1 exists only when step 0 is applied
    ray.get(evolution.stepped.remote(0, None))
    assert names(ray.get(later, timeout=10)) == ["e", "f", "g", "h"]
    stats = ray.get(evolution.stats.remote())
    assert (stats["version"], stats["updates"], stats["handed"]) == (0, 1, 8)


def test_a_full_queue_drops_the_oldest(evolution: ActorHandle) -> None:
    submit(evolution, *"abcdefgh")
    assert names(ray.get(evolution.next_batch.remote(0, 1, 0), timeout=10)) == ["c", "d", "e", "f"]
    stats = ray.get(evolution.stats.remote())
    assert (stats["received"], stats["dropped"], stats["queue"]) == (8, 2, 2)


def test_a_restarted_learner_gets_its_unfinished_batch_again(evolution: ActorHandle) -> None:
    submit(evolution, *"abcd")
    once = ray.get(evolution.next_batch.remote(0, 1, 0), timeout=10)
    ray.get(evolution.begin.remote(0, {}, 0))
    assert names(ray.get(evolution.next_batch.remote(0, 1, 0), timeout=10)) == names(once)


def test_draining_gives_what_is_left_and_then_none(evolution: ActorHandle) -> None:
    submit(evolution, *"abcde")
    ray.get(evolution.drain.remote())
    assert submit(evolution, "late") == [False]
    assert names(ray.get(evolution.next_batch.remote(0, 1, 0), timeout=10)) == ["a", "b", "c", "d"]
    ray.get(evolution.stepped.remote(0, None))
    assert names(ray.get(evolution.next_batch.remote(0, 1, 1), timeout=10)) == ["e"]
    ray.get(evolution.stepped.remote(1, None))
    assert ray.get(evolution.next_batch.remote(0, 1, 2), timeout=10) is None


def test_every_generator_holds_what_is_promoted_whatever_the_learner_starts_from(place: Callable[..., Placed]) -> None:
    generator = ScriptedGenerator.remote(0)
    ray.get(generator.load.remote(40))
    placed = place(generators=(generator,))
    assert placed.call("stats")["learning"] == 0
    assert ray.get(generator.health.remote())["version"] == 0
    version = placed.publish(1.0, promote=True)
    placed.call("begin", 3, {"base": 0}, version)
    assert (placed.call("stats")["learning"], placed.call("stats")["version"]) == (1, version)
    assert ray.get(generator.health.remote())["version"] == version
    assert placed.call("status")["restoring"] == version
    ray.kill(generator)


def test_views_outlive_who_made_them(evolution: ActorHandle) -> None:
    @ray.remote(num_cpus=0)
    class Replica:
        def send(self, to: ActorHandle, work: UpdateTask) -> None:
            ray.get(to.submit.remote(work, [ray.put({"view": work.question_id})]))

    replica = Replica.remote()
    for name in "abcd":
        ray.get(replica.send.remote(evolution, task(name)))
    ray.kill(replica)
    batch = ray.get(evolution.next_batch.remote(0, 1, 0), timeout=10)
    assert ray.get(batch.views, timeout=10) == [{"view": name} for name in "abcd"]


def test_too_few_left_for_all_ranks_ends_the_run_for_all(evolution: ActorHandle) -> None:
    submit(evolution, "a")
    ray.get(evolution.drain.remote())
    assert ray.get([evolution.next_batch.remote(rank, 2, 0) for rank in range(2)], timeout=10) == [None, None]
    assert ray.get(evolution.stats.remote())["left_over"] == 1


def test_a_stop_never_splits_the_ranks(evolution: ActorHandle) -> None:
    submit(evolution, *"abcd")
    first = ray.get(evolution.next_batch.remote(0, 2, 0), timeout=10)
    ray.get(evolution.stop.remote())
    second = ray.get(evolution.next_batch.remote(1, 2, 0), timeout=10)
    assert (names(first), names(second)) == (["a", "c"], ["b", "d"])
    ray.get(evolution.stepped.remote(0, None))
    assert ray.get([evolution.next_batch.remote(rank, 2, 1) for rank in range(2)], timeout=10) == [None, None]


def test_unscored_groups_are_counted_and_left_out(evolution: ActorHandle) -> None:
    submit(evolution, "a", "b", rewards=(None, None, 1.0))
    submit(evolution, "c", "d")
    assert names(ray.get(evolution.next_batch.remote(0, 1, 0), timeout=10)) == ["c", "d"]
    assert ray.get(evolution.stats.remote())["unusable"] == 2


def test_waiting_for_traffic_blocks_nobody_else(evolution: ActorHandle) -> None:
    waiting = evolution.next_batch.remote(0, 1, 0)
    with pytest.raises(GetTimeoutError):
        ray.get(waiting, timeout=0.3)
    assert ray.get(evolution.stats.remote(), timeout=5)["queue"] == 0
    assert ray.get(evolution.health.remote(), timeout=5) == "ok"
