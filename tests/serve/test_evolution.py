"""The Evolution actor on a real cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from placed_actors import restart, wait_until
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError
from scripted import ScriptedGenerator

from pixelis.actors.evolution import Evolution
from pixelis.actors.generator_router import RolloutRequest
from pixelis.actors.group_views import GroupViews, fetch
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import load
from pixelis.errors import BadInput, InfraFailure, MissingFile
from pixelis.evolution import audit
from pixelis.policy.adapters import Adapter
from pixelis.records import (
    Feedback,
    ImageView,
    Media,
    Question,
    StopReason,
    Trajectory,
    Turn,
    UpdateTask,
    Verdict,
    VersionStatus,
    Vote,
)
from pixelis.telemetry import tracing

pytestmark = pytest.mark.slow


def task(name: str, rewards: tuple[float | None, ...] = (1.0, 1.0, 0.0), version: int = 0) -> UpdateTask:
    turns = [
        Turn(role="user", tokens=[1]),
        Turn(role="assistant", tokens=[2, 3], log_probs=[-0.1, -0.2]),
    ]
    common: dict[str, Any] = {"question_id": name, "group_id": f"group-{name}", "turns": turns}
    common |= {"answer": "7", "stop_reason": StopReason.ANSWER, "policy_version": version}
    trajectories = [Trajectory(id=f"{name}-{i}", reward=reward, **common) for i, reward in enumerate(rewards)]
    scored: dict[str, Any] = {"pseudo_label": "7", "confidence": 0.75, "created_at": 0.0}
    return UpdateTask(question_id=name, trajectories=trajectories, experience_id=name, **scored)


OVERRIDES = ["evolution.batch=4", "evolution.queue=6", "evolution.per_minute=6000"]


class Placed:
    """An Evolution actor with a real store and, unless they are given, no generators."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        generators: tuple[ActorHandle, ...] = (),
        canary: ActorHandle | None = None,
        store: ActorHandle | None = None,
    ):
        own = [*OVERRIDES, f"run.dir={folder}", f"evolution.canary.enabled={canary is not None}".lower()]
        name = f"store-{time.monotonic_ns()}"
        self.store = store or PolicyStore.options(name=name).remote(str(folder))
        config = load(None, [*own, *overrides])
        self.actor = Evolution.remote(config, list(generators), store or name, canary)
        self.actors = [self.actor] if store else [self.actor, self.store]

    def publish(self, value: float) -> int:
        a, b = np.full((2, 3), value, np.float32), np.full((4, 2), value, np.float32)
        adapter = Adapter({"layer.A": a, "layer.B": b}, 2, 2, "base")
        return ray.get(self.store.publish.remote(adapter, "evolve", 0, {}, False))

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """What the actor answers, asked again while it starts again."""
        give_up = time.monotonic() + 90
        while True:
            try:
                return ray.get(getattr(self.actor, method).remote(*arguments, **named), timeout=60)
            except ActorUnavailableError:
                assert time.monotonic() < give_up
                time.sleep(0.1)

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


@pytest.fixture
def place(ray_cluster: None, tmp_path: Path) -> Iterator[Callable[..., Placed]]:
    placed: list[Placed] = []

    def make(*overrides: str, **actors: Any) -> Placed:
        placed.append(Placed(tmp_path, *overrides, **actors))
        return placed[-1]

    yield make
    for actors in placed:
        actors.end()


@pytest.fixture(scope="module")
def bare_store(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActorHandle]:
    """For tests in which nothing is published."""
    store = PolicyStore.remote(str(tmp_path_factory.mktemp("store")))
    yield store
    ray.kill(store)


@pytest.fixture
def evolution(bare_store: ActorHandle, tmp_path: Path) -> Iterator[ActorHandle]:
    placed = Placed(tmp_path, store=bare_store)
    placed.call("begin", 0, {"base": 0}, 0)
    yield placed.actor
    placed.end()


Scripted = ScriptedGenerator.__ray_metadata__.modified_class


@ray.remote(num_cpus=0)
class Versioned(Scripted):
    """Answers 7, and 8 once it holds a version among ``bad``; remembers what it held."""

    def __init__(self, bad: tuple[int, ...]):
        super().__init__(0)
        self.bad, self.loaded = bad, list[int]()

    async def load(self, version: int) -> int:
        self.loaded.append(version)
        return await super().load(version)

    async def history(self) -> list[int]:
        return self.loaded

    @ray.method(num_returns=2)
    async def rollout(self, request: RolloutRequest):  # type: ignore[no-untyped-def]
        assert request.question.answers is None
        question = request.question.model_copy(
            update={"question": f"say {8 if self.version in self.bad else 7}"}
        )
        return await self._play(replace(request, question=question))


def questions(folder: Path, count: int = 8) -> str:
    media = [Media(id="img0", uri="cards:train:0:0", width=8, height=8)]
    rows = [Question(id=f"q{i}", question="which?", media=media, answers=["7"]) for i in range(count)]
    path = folder / "canary.jsonl"
    path.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    return str(path)


def submit(actor: ActorHandle, *names: str, **options: Any) -> list[bool]:
    views = GroupViews(ray.put({}))
    # One by one: order counts here
    return [ray.get(actor.submit.remote(task(name, **options), views)) for name in names]


def names(batch: Any) -> list[str]:
    return [group.question.id for group in batch.groups]


def test_ranks_share_a_batch_and_steps_follow_each_other(evolution: ActorHandle) -> None:
    waiting = [evolution.next_batch.remote(rank, 2, 0) for rank in range(2)]
    assert ray.wait(waiting, timeout=0.3)[0] == []
    submit(evolution, "a", "b", "c", "d", "e")
    first, second = ray.get(waiting, timeout=60)
    assert (names(first), names(second)) == (["a", "c"], ["b", "d"])
    metrics = first.metrics
    assert metrics == second.metrics
    expected = {"evolve/tasks": 4, "evolve/confidence": 0.75, "evolve/uniform": 0}
    assert {name: metrics[name] for name in expected} == expected
    later = evolution.next_batch.remote(0, 1, 1)
    submit(evolution, "f", "g", "h")
    assert ray.wait([later], timeout=0.3)[0] == []  # step 1 exists only when step 0 is applied
    ray.get(evolution.step_done.remote(0, None))
    assert names(ray.get(later, timeout=60)) == ["e", "f", "g", "h"]
    stats = ray.get(evolution.stats.remote())
    assert (stats["version"], stats["updates"], stats["handed"]) == (0, 1, 8)


def test_a_restarted_learner_gets_its_unfinished_batch_again(evolution: ActorHandle) -> None:
    submit(evolution, *"abcd")
    once = ray.get(evolution.next_batch.remote(0, 1, 0), timeout=60)
    ray.get(evolution.begin.remote(0, {}, 0))
    assert names(ray.get(evolution.next_batch.remote(0, 1, 0), timeout=60)) == names(once)


def test_views_outlive_their_gateway(evolution: ActorHandle) -> None:
    @ray.remote(num_cpus=0)
    class Replica:
        def send(self, to: ActorHandle, work: UpdateTask) -> None:
            view = np.full((4, 4, 3), ord(work.question_id), np.uint8)
            ray.get(to.submit.remote(work, GroupViews(ray.put({"t": [view]}))))

    replica = Replica.remote()
    for name in "abcd":
        ray.get(replica.send.remote(evolution, task(name)))
    ray.kill(replica)
    batch = ray.get(evolution.next_batch.remote(0, 1, 0), timeout=60)
    assert [views["t"][0].flat[0] for views in fetch(batch.views)] == [ord(name) for name in "abcd"]


@pytest.mark.long
def test_too_few_tasks_for_all_ranks_end_the_run(evolution: ActorHandle) -> None:
    submit(evolution, "a")
    ray.get(evolution.drain.remote())
    assert ray.get([evolution.next_batch.remote(rank, 2, 0) for rank in range(2)], timeout=60) == [None, None]
    assert ray.get(evolution.stats.remote())["left_over"] == 1


@pytest.mark.long
def test_a_stop_never_splits_the_ranks(evolution: ActorHandle) -> None:
    submit(evolution, *"abcd")
    first = ray.get(evolution.next_batch.remote(0, 2, 0), timeout=60)
    ray.get(evolution.stop.remote())
    second = ray.get(evolution.next_batch.remote(1, 2, 0), timeout=60)
    assert (names(first), names(second)) == (["a", "c"], ["b", "d"])
    ray.get(evolution.step_done.remote(0, None))
    assert ray.get([evolution.next_batch.remote(rank, 2, 1) for rank in range(2)], timeout=60) == [None, None]


def test_a_service_that_can_learn_nothing_raises_an_alert(place: Callable[..., Placed]) -> None:
    placed = place("evolution.alerts.every_s=0.05")
    assert not any(submit(placed.actor, *(f"task{i}" for i in range(16)), rewards=(None, None)))
    assert placed.call("stats")["unusable"] == 16
    wait_until(lambda: "unusable_tasks" in [alert["metric"] for alert in placed.call("alerts")])


def test_nothing_is_learnt_from_a_user_whose_votes_are_rarely_clear(place: Callable[..., Placed]) -> None:
    placed = place("evolution.alerts.every_s=0.05", "evolution.queue=100")
    verdict = Verdict(answer="7", confidence=0.75, strategy="majority", votes=[Vote(answer="7")])
    views = GroupViews(ray.put({}))

    def accepted(user: str, name: str, unclear: int) -> bool:
        work = task(name).model_copy(update={"user": user})
        return placed.call("submit", work, views, verdict, Question(id=name, question=name), None, unclear)

    assert accepted("strange", "first", 0)
    assert not any(accepted("strange", f"strange{i}", 40) for i in range(2, 20))
    wait_until(lambda: "unclear_tasks" in [alert["metric"] for alert in placed.call("alerts")])
    assert all(accepted("known", f"known{i}", 1) for i in range(40))
    stats = placed.call("stats")
    assert (stats["unclear"], stats["received"], stats["queue"]) == (19, 41, 40), (
        "the first one, still waiting, is dropped too"
    )


def test_the_update_and_the_promotion_that_learnt_from_a_request_are_in_its_trace(
    place: Callable[..., Placed], tmp_path: Path
) -> None:
    serving = Versioned.remote(())
    placed = place("telemetry.traces=file", "evolution.batch=2", generators=(serving,))
    callers = [f"00-{number:032x}-00f067aa0ba902b7-01" for number in (1, 2)]
    for number, caller in enumerate(callers):
        traced = task(f"traced{number}").model_copy(update={"trace": caller})
        assert placed.call("submit", traced, GroupViews(ray.put({})))
    placed.call("begin", 0, {}, 0)
    placed.call("next_batch", 0, 1, 0)
    placed.call("step_done", 0, placed.publish(1.0))

    def spans() -> dict[str, set[str]]:
        traces = tracing.read(tmp_path / tracing.FOLDER)
        return {id: {span["name"] for span in spans} for id, spans in traces.items()}

    expected = {caller.split("-")[1]: {"submit", "update", "promotion"} for caller in callers}
    wait_until(lambda: spans() == expected)


def test_refused_versions_are_not_served_and_the_learner_resets(
    place: Callable[..., Placed], tmp_path: Path
) -> None:
    serving, judging = (Versioned.remote((2, 4)) for _ in range(2))
    ray.get(serving.load.remote(40))  # of another incarnation
    canary = [f"evolution.canary.questions={questions(tmp_path)}", "evolution.canary.count=8"]
    canary += ["evolution.canary.watch_s=1000"]
    canary += ["evolution.canary.risk=1"]  # eight questions rule nothing out
    placed = place(*canary, "evolution.batch=1", generators=(serving,), canary=judging)
    assert placed.call("stats")["learning"] == 0
    placed.call("begin", 0, {"base": 0}, 0)

    def step(number: int, version: int | None) -> tuple[int | None, int | None]:
        """The version that the learner is told to restore, and the one that its checkpoint may go on from."""
        submit(placed.actor, f"task{number}", version=placed.call("stats")["version"])
        batch = placed.call("next_batch", 0, 1, number)
        result = placed.call("step_done", number, version, None, {"evolve/kl": 0.01})
        return batch.restore, result.state["base"]

    def status(version: int) -> VersionStatus:
        return next(v.status for v in placed.call("versions") if v.version == version)

    def served() -> int:
        return placed.call("status")["served"]

    good, bad = placed.publish(1.0), placed.publish(2.0)
    assert (step(0, good), served()) == ((None, good), good)
    assert step(1, bad) == (None, None), "a checkpoint of what was refused is not to be gone on from"
    assert (served(), status(bad)) == (good, VersionStatus.ROLLED_BACK)
    assert step(2, None) == (good, good)
    assert placed.call("status")["restoring"] is None
    better = placed.publish(3.0)
    step(3, better)
    assert [e["decision"] for e in placed.call("canary_curve")] == ["promote", "refuse", "promote"]

    assert not placed.call("check_served"), "it is as good as it was"
    assert placed.call("roll_back", None, "ann") == {"version": good}
    assert submit(placed.actor, "of the withdrawn", version=better) == [False]
    with pytest.raises(BadInput, match="not promoted before"):
        placed.call("roll_back", better, "ann")
    late = placed.publish(4.0)
    assert not placed.call("candidate", late), "it comes from weights that were withdrawn"
    assert status(late) is VersionStatus.ROLLED_BACK

    assert not placed.call("promote", bad, "bob")["promoted"]
    assert served() == good
    assert placed.call("promote", bad, "bob", force=True)["promoted"]
    assert ray.get(serving.health.remote())["version"] == bad
    submit(placed.actor, "of the forced one", version=bad)
    assert placed.call("check_served"), "the watch sees what was forced"
    assert (served(), placed.call("status")["restoring"]) == (good, good)
    assert placed.call("stats")["withdrawn"] == 2
    assert placed.call("alerts")[0]["metric"] == "rollback"
    with pytest.raises(MissingFile, match="no policy version 77"):
        placed.call("promote", 77, "bob")
    assert placed.call("roll_back", 0, "ann") == {"version": 0}
    with pytest.raises(BadInput, match="starting policy"):
        placed.call("roll_back", None, "ann")

    expected = [40, 0, good, better, good, bad, good, 0]  # only what was promoted, or forced
    assert ray.get(serving.history.remote()) == expected
    assert {good, bad, better} <= set(ray.get(judging.history.remote()))
    events = [(e["event"], e["actor"]) for e in placed.call("recent_audit", 100)]
    assert next(event for event in events if event[0] in ("promotion", "rollback")) == ("rollback", "ann")
    assert ("rollback", "watch") in events
    assert audit.verify(tmp_path / audit.FOLDER).ok
    for actor in (serving, judging):
        ray.kill(actor)


def submit_for_review(placed: Placed, name: str) -> bool:
    update = task(name)
    for trajectory in update.trajectories:
        trajectory.images = [ImageView(id="img0", view_size=(8, 8))]
    views = GroupViews(ray.put({t.id: [np.full((8, 8, 3), 9, np.uint8)] for t in update.trajectories}))
    votes = [Vote(answer="7"), Vote(answer="8")]
    verdict = Verdict(answer="7", confidence=0.75, strategy="majority", votes=votes)
    return placed.call("submit", update, views, verdict, Question(id=name, question="how many?"))


def test_a_restarted_actor_keeps_reviews_and_the_promoted_version(
    place: Callable[..., Placed], tmp_path: Path
) -> None:
    placed = place("evolution.review.share=1", "evolution.batch=1")
    version = placed.publish(1.0)
    placed.call("begin", 0, {"base": 0}, 0)
    assert placed.call("candidate", version), "without a canary every candidate serves"
    for name in ("one", "two", "three", "four"):
        assert submit_for_review(placed, name)
    waiting = placed.call("reviews")
    assert [row["experience_id"] for row in waiting] == ["one", "two", "three", "four"]
    assert all("task" not in row and not row["trajectory"]["turns"][1]["tokens"] for row in waiting)
    one, two, _, four = (row["id"] for row in waiting)
    assert placed.call("review", one)["pictures"]["img0"].startswith(b"\x89PNG")
    assert placed.call("decide", one, False, "ann") == {"state": "rejected", "queued": False}
    with pytest.raises(BadInput, match="rejected by ann"):
        placed.call("decide", one, True, "bob")
    for queued in (True, False):
        decision = placed.call("decide", two, True, "key ops", "well", "8", "ann")
        assert decision == {"state": "approved", "queued": queued}
    placed.call("pause", "ann")
    assert placed.call("stats")["queue"] == 1, "a pause keeps what a person approved"

    restart(placed.actor)
    assert [row["experience_id"] for row in placed.call("reviews")] == ["three", "four"]
    with pytest.raises(InfraFailure, match="was restarted"):
        placed.call("next_batch", 0, 1, 4)  # of a learner that knows nothing of it
    assert placed.call("status")["paused"], "an order of a person stands"
    stats = placed.call("stats")
    assert (stats["version"], stats["learning"]) == (version, 0)
    assert stats["queue"] == 1, "what a person approved is not lost"
    reviews = list(audit.search(tmp_path / audit.FOLDER, event="review"))
    assert [(e.actor, e.details["reviewer"]) for e in reviews] == [("ann", ""), ("key ops", "ann")]
    assert placed.call("forget", ["three"]) == 1
    placed.call("begin", 5, {"base": 0}, version)
    placed.call("resume", "ann")
    batch = placed.call("next_batch", 0, 1, 5)
    assert names(batch) == ["two"]
    assert batch.restore == version, "the learner's checkpoint is older than what is promoted"
    assert fetch(batch.views)[0]["two-0"][0].shape == (8, 8, 3)
    placed.call("step_done", 5, None)

    restart(placed.actor)
    assert placed.call("stats")["queue"] == 0, "what was learnt from does not come again"
    assert placed.call("status")["shares"]["users"] == 1, "a restart frees nobody of a cap"
    placed.call("drain")
    with pytest.raises(InfraFailure, match="the service is ending"):
        placed.call("decide", four, True, "ann")
    assert [row["id"] for row in placed.call("reviews")] == [four], "it is not decided"
    assert audit.verify(tmp_path / audit.FOLDER).ok
    assert [e["event"] for e in placed.call("recent_audit", 100)].count("start") == 5


def test_a_failed_learner_is_named_and_alerted_and_the_next_one_begins(place: Callable[..., Placed]) -> None:
    placed = place("evolution.batch=1")
    placed.call("begin", 0, {"base": 0}, 0)
    placed.call("learner_failed", "no space left")
    status = placed.call("status")
    assert (status["learning"], status["learner_failure"]) == (False, "no space left")
    assert [alert["metric"] for alert in placed.call("alerts")] == ["learner_failed"]
    assert placed.call("recent_audit", 2)[1]["details"] == {"cause": "no space left"}
    submit(placed.actor, "meanwhile")
    incarnation = placed.call("begin", 3, {"base": 0}, 0)
    assert names(placed.call("next_batch", 0, 1, 3, incarnation)) == ["meanwhile"]
    assert placed.call("status")["learner_failure"] == ""


@pytest.mark.long
def test_the_guard_and_the_rate_decide_how_an_update_is_made(
    place: Callable[..., Placed], bare_store: ActorHandle
) -> None:
    own = ["evolution.batch=1", "evolution.per_minute=0.1", "evolution.lr=1e-3", "evolution.lr_by=confidence"]
    placed = place(*own, "evolution.review.share=1", "evolution.review.approve_after_s=0.5", store=bare_store)
    placed.call("begin", 0, {"base": 0}, 0)
    submit_for_review(placed, "first")
    options = placed.call("next_batch", 0, 1, 0).options  # nobody came to review it
    assert placed.call("reviews", "approved")[0]["reviewer"] == "timeout"
    assert (options["lr"], options["kl_weight"], options["kl_limit"]) == pytest.approx((0.25e-3, 0.01, 0.1))
    for step in range(11):
        measured = {"evolve/kl": 0.5, "evolve/skipped": float(step % 2)}
        result = placed.call("step_done", step, None, None, measured)
    stats, status = placed.call("stats"), placed.call("status")
    assert (stats["updates"], stats["skipped"], status["mean_kl"]) == (6, 5, 0.5)
    once = [(alert["metric"], alert["value"]) for alert in placed.call("alerts")]
    assert once == [("update_kl", 0.5)]
    assert status["beta"] == pytest.approx(0.01 * 1.2**2), "it grows from the tenth measurement on"
    assert result.state["beta"]["beta"] == status["beta"]
    submit(placed.actor, "second")
    later = placed.actor.next_batch.remote(0, 1, 11)
    assert ray.wait([later], timeout=0.5)[0] == [], "one in ten minutes, that was"


def test_feedback_and_a_pause_remove_tasks_from_the_queue(
    place: Callable[..., Placed], bare_store: ActorHandle
) -> None:
    placed = place(store=bare_store)
    placed.call("begin", 0, {"base": 0}, 0)
    submit(placed.actor, "a", "b", "c")
    for name, said in (
        ("a", Feedback(correct=False)),
        ("b", Feedback(answer="7")),
        ("c", Feedback(answer="8")),
    ):
        placed.call("feedback", name, said)
    assert (placed.call("stats")["queue"], placed.call("stats")["disowned"]) == (1, 2)
    assert placed.call("forget", ["b", "on its way"]) == 1
    late = submit(placed.actor, "on its way", "c", "f")
    assert late == [False, False, True], "feedback on c may be faster than its task"
    placed.call("pause", "ann")
    assert submit(placed.actor, "d") == [False]
    assert (placed.call("stats")["queue"], placed.call("status")["paused"]) == (0, True)
    placed.call("resume", "ann")
    assert submit(placed.actor, "e") == [True]
    orders = [e["action"] for e in placed.call("recent_audit", 50) if e["event"] == "pause"]
    assert orders == ["resume", "pause"]
