"""Rollouts on real actors: groups stay whole, batches use every question once, a killed generator costs nothing."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pixelis.actors import cluster
from pixelis.actors.coordinator import Batch, Coordinator
from pixelis.actors.policy_store import PolicyStore
from pixelis.config import Config, parse
from pixelis.datasets.questions import read_questions
from pixelis.engines import SamplingParams
from pixelis.errors import BadInput, DataFailure, InfraFailure
from pixelis.policy.adapters import Adapter, adapted_layers, save_adapter
from pixelis.policy.model import fingerprint, load_model
from pixelis.records import Group

pytestmark = pytest.mark.slow

FactoryOfModels = Callable[..., Path]


@dataclass
class Placed:
    """Actors of one job, and what they were placed with."""

    config: Config
    actors: cluster.Actors
    adapter: Adapter

    def coordinator(self, **rft: Any) -> Any:
        """A fresh coordinator before the same generators, scorers and store."""
        config = self.config.model_copy(update={"rft": self.config.rft.model_copy(update=rft)})
        a = self.actors
        return cluster.spawn(Coordinator, config, a.generators, a.scorers, num_cpus=0)


@pytest.fixture(scope="module")
def placed(ray_cluster: None, model: FactoryOfModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Placed]:
    """Two generators, one toolbox and one scorer of a random model that starts from a random adapter."""
    folder, run = model(), tmp_path_factory.mktemp("run")
    config = parse(
        {
            "run": {"dir": str(run), "name": "rollouts"},
            "policy": {"model": str(folder), "lora": {"rank": 4, "alpha": 8}},
            "engine": {"workers": 2},
            "dialogue": {"max_turn_tokens": 12},
            "rft": {"steps": 3, "questions": 3, "group": 2},
            "rewards": {"weights": {"accuracy": 1.0, "format": 0.1, "curiosity": 1.0}},
        }
    )
    adapter = random_adapter(folder, seed=0)
    save_adapter(adapter, run / "start" / "step_00000007")
    with cluster.placed(config, learner=False, initial=str(run / "start" / "step_00000007")) as actors:
        yield Placed(config, actors, adapter)


def random_adapter(folder: Path, seed: int) -> Adapter:
    rng = np.random.default_rng(seed)
    policy = parse({"policy": {"model": str(folder)}}).policy
    tensors = {}
    for name, layer in adapted_layers(load_model(policy, "cpu")[0], policy.lora.targets).items():
        tensors[f"{name}.A"] = rng.normal(0, 0.1, (4, layer.in_features)).astype(np.float32)
        tensors[f"{name}.B"] = rng.normal(0, 0.1, (layer.out_features, 4)).astype(np.float32)
    return Adapter(tensors, 8, 4, fingerprint(folder))


@contextmanager
def alone(actor: Any) -> Iterator[Any]:
    try:
        yield actor
    finally:
        ray.kill(actor)


def check_group(group: Group, views: dict[str, list[np.ndarray]], size: int) -> None:
    """Every trajectory belongs to the group's question; views are those that its images describe; advantages sum to 0."""
    assert len(group.trajectories) == size
    assert len({t.id for t in group.trajectories}) == size
    assert set(views) == {t.id for t in group.trajectories}
    for trajectory in group.trajectories:
        assert trajectory.question_id == group.question.id
        assert trajectory.group_id == group.id
        assert trajectory.policy_version == group.policy_version
        assert trajectory.unscored is None
        shapes = [(image.view_size[1], image.view_size[0], 3) for image in trajectory.images]
        assert [view.shape for view in views[trajectory.id]] == shapes
        assert trajectory.images[0].id == group.question.media[0].id
        assert len(trajectory.loss_mask()) == len(trajectory.token_ids()) > 0
    assert sum(t.advantage or 0.0 for t in group.trajectories) == pytest.approx(0, abs=1e-4)


def learn(coordinator: Any, steps: int, world: int, version: int, after: Callable[[int], int] | None = None) -> list[list[Batch]]:
    """What a learner of ``world`` ranks asks for, step by step; ``after`` gives the version it published."""
    ray.get(coordinator.begin.remote(0, {}, version), timeout=120)
    taken = []
    for step in range(steps):
        shares = ray.get([coordinator.next_batch.remote(rank, world, step) for rank in range(world)], timeout=240)
        taken.append(shares)
        version = after(step) if after else version
        ray.get(coordinator.stepped.remote(step, version), timeout=120)
    assert ray.get(coordinator.next_batch.remote(0, world, steps), timeout=60) is None
    return taken


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    each=st.integers(1, 2), world=st.integers(1, 3), group=st.integers(2, 4), staleness=st.integers(0, 2), steps=st.integers(1, 3)
)
def test_groups_stay_whole_and_questions_are_used_once(
    placed: Placed, each: int, world: int, group: int, staleness: int, steps: int
) -> None:
    questions = each * world
    with alone(placed.coordinator(questions=questions, group=group, staleness=staleness, steps=steps)) as coordinator:
        taken = learn(coordinator, steps, world, version=0)
    used = []
    for shares in taken:
        assert [len(share.groups) for share in shares] == [each] * world
        for share in shares:
            assert share.metrics["rollout/staleness"] <= staleness
            used += [g.question.id for g in share.groups]
            for one, views in zip(share.groups, ray.get(share.views), strict=True):
                check_group(one, views, group)
    source = read_questions(placed.config.data.train, seed=placed.config.run.seed)
    wanted = [next(source).id for _ in range(questions * steps)]
    assert Counter(used) == Counter(wanted)
    if staleness == 0:
        assert taken[-1][0].state == {"questions": {"cursor": questions * steps, "ahead": []}}


def test_views_of_a_group_are_one_object_and_the_question_picture_one_array(placed: Placed) -> None:
    with alone(placed.coordinator(questions=2, group=4, steps=1)) as coordinator:
        ((batch,),) = learn(coordinator, 1, 1, version=0)
    assert len(set(batch.views)) == len(batch.groups) == 2
    for views in ray.get(batch.views):
        first = [shown[0] for shown in views.values()]
        assert len(first) == 4
        assert all(np.shares_memory(first[0], other) for other in first[1:]), "the overview is kept once, not once a rollout"


def test_a_batch_is_rolled_out_with_the_weights_that_the_learner_just_published(placed: Placed) -> None:
    adapters = [random_adapter(Path(placed.config.policy.model), seed=i) for i in (1, 2)]

    def publish(step: int) -> int:
        return ray.get(placed.actors.store.publish.remote(adapters[step], "rft", step + 1))

    with alone(placed.coordinator(steps=2)) as coordinator:
        first, second = learn(coordinator, 2, 1, version=0, after=publish)
    assert {g.policy_version for g in first[0].groups} == {0}
    (version,) = {g.policy_version for g in second[0].groups}
    assert version > 0
    held = ray.get([g.health.remote() for g in placed.actors.generators])
    assert {health["version"] for health in held} == {ray.get(placed.actors.store.promoted.remote())}


def said(placed: Placed, generator: Any, version: int) -> list[list[int]]:
    """Greedy tokens of three questions: what the weights of ``version`` write."""
    ray.get(generator.load.remote(version), timeout=60)
    source = read_questions("cards:?split=validation&seed=1")
    refs = [generator.rollout.remote(next(source), f"probe-{i}", 1, SamplingParams(temperature=0.0))[0] for i in range(3)]
    groups = ray.get(refs, timeout=60)
    assert {g.policy_version for g in groups} == {version}
    return [t.token_ids() for g in groups for t in g.trajectories]


def test_a_version_is_what_its_number_says_on_a_fresh_generator_too(placed: Placed) -> None:
    """Version 0 is the adapter that the run started from, not the bare model, also after a restart."""
    store, (one, two) = placed.actors.store, placed.actors.generators
    other = ray.get(store.publish.remote(random_adapter(Path(placed.config.policy.model), seed=5), "rft", 9))
    start = said(placed, one, 0)
    assert said(placed, one, other) != start
    kill(two)
    wait_until_alive(two)
    assert said(placed, two, 0) == start
    zero = {name: np.zeros_like(values) for name, values in placed.adapter.tensors.items()}
    bare = ray.get(store.publish.remote(Adapter(zero, 8, 4, placed.adapter.base_sha256), "rft", 10))
    assert said(placed, two, bare) != start, "the adapter changes what the model says"


def pid_of(generator: Any) -> int:
    return int(ray.get(generator.health.remote(), timeout=60)["pid"])


def kill(generator: Any) -> int:
    pid = pid_of(generator)
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_until_alive(generator: Any, timeout_s: float = 60) -> None:
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        try:
            ray.get(generator.health.remote(), timeout=30)
            return
        except ray.exceptions.RayActorError:
            time.sleep(0.3)
    raise AssertionError("the generator did not come back")


def test_a_generator_killed_during_rollouts_costs_no_group_and_doubles_none(placed: Placed) -> None:
    """Killed with work in flight; its groups are done elsewhere or by its successor, which holds the current version."""
    victim = placed.actors.generators[0]
    version = ray.get(placed.actors.store.promoted.remote())
    with alone(placed.coordinator(questions=12, group=4, steps=2)) as coordinator:
        ray.get(coordinator.begin.remote(0, {}, version), timeout=120)
        before = pid_of(victim)
        give_up = time.monotonic() + 60
        while ray.get(victim.health.remote())["sessions"] == 0 and time.monotonic() < give_up:
            time.sleep(0.02)
        killed = kill(victim)
        batches = []
        for step in range(2):
            batches.append(ray.get(coordinator.next_batch.remote(0, 1, step), timeout=240))
            ray.get(coordinator.stepped.remote(step, version), timeout=120)
        progress = ray.get(coordinator.progress.remote())
        wait_until_alive(victim)
        give_up = time.monotonic() + 60
        while ray.get(coordinator.progress.remote())["fleet/able"] < 2 and time.monotonic() < give_up:
            time.sleep(0.2)
        assert ray.get(coordinator.progress.remote())["fleet/able"] == 2, "its successor works again"
    assert killed == before
    assert progress["fleet/failures"] >= 1, "the kill hit work in flight"
    groups = [g for batch in batches for g in batch.groups]
    source = read_questions(placed.config.data.train, seed=placed.config.run.seed)
    assert Counter(g.question.id for g in groups) == Counter(next(source).id for _ in range(24))
    assert {g.policy_version for g in groups} == {version}
    for batch in batches:
        for group, views in zip(batch.groups, ray.get(batch.views), strict=True):
            check_group(group, views, 4)
    health = ray.get(victim.health.remote(), timeout=60)
    assert health["pid"] != killed
    assert health["version"] == version


def test_what_is_wrong_with_the_questions_is_told_and_not_retried(placed: Placed, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "a", "question": "?", "answers": ["1"]}\n{"id": "b"}\n')
    gone = tmp_path / "gone.jsonl"
    row = '{{"id": "{0}", "question": "?", "answers": ["1"], "media": [{{"id": "img0", "uri": "{1}/no.png"}}]}}\n'
    gone.write_text("".join(row.format(i, tmp_path) for i in range(20)))
    for source, kind, words in ((bad, BadInput, ("line 2", "column question")), (gone, DataFailure, ("image_not_found",))):
        data = placed.config.data.model_copy(update={"train": str(source)})
        other = Placed(placed.config.model_copy(update={"data": data}), placed.actors, placed.adapter)
        with alone(other.coordinator()) as coordinator:
            ray.get(coordinator.begin.remote(0, {}, 0), timeout=60)
            with pytest.raises(kind) as caught:
                ray.get(coordinator.next_batch.remote(0, 1, 0), timeout=60)
            told = cluster.own_error(caught.value)
            assert told is not None
            for word in words:
                assert word in str(told)
            assert "Traceback" not in str(told)


# -- generators that cannot work ---------------------------------------------------------------------------------------------


@ray.remote(num_cpus=0, max_concurrency=16)
class Asker:
    """A fleet with short patience, as the Coordinator holds one, in an actor of its own."""

    def __init__(self, generators: list, deadline_s: float, load_timeout_s: float):
        from pixelis.actors.fleet import Fleet

        self.fleet = Fleet(generators, deadline_s, load_timeout_s)

    async def load(self, version: int) -> dict[str, float]:
        await self.fleet.load(version)
        return self.fleet.stats()

    async def stats(self) -> dict[str, float]:
        return self.fleet.stats()

    async def ask(self, number: int) -> Group:
        from pixelis.datasets.questions import read_questions as read

        question = next(read("cards:?split=train", start=number))
        group, _ = await self.fleet.rollout(question, f"g{number}", 2, SamplingParams(), True, 2)
        return await group if isinstance(group, ray.ObjectRef) else group


@ray.remote(num_cpus=0)
class Slow:
    """A generator whose load of a version takes ``seconds`` (once)."""

    def __init__(self, seconds: float):
        self.seconds, self.version, self.rollouts = seconds, 0, 0

    async def load(self, version: int) -> int:
        import asyncio

        if self.version != version:
            await asyncio.sleep(self.seconds)
        self.version = version
        return version

    async def count(self) -> int:
        return self.rollouts

    @ray.method(num_returns=2)
    async def rollout(self, question: Any, group_id: str, n: int, *_: Any) -> tuple[Group, dict]:
        self.rollouts += 1
        return Group(id=group_id, question=question, policy_version=self.version), {}


def test_a_generator_that_loads_too_late_is_not_used_until_it_has_loaded(placed: Placed) -> None:
    quick, late = Slow.remote(0.0), Slow.remote(4.0)
    fleet = Asker.remote([quick, late], deadline_s=60.0, load_timeout_s=1.0)
    try:
        stats = ray.get(fleet.load.remote(3), timeout=60)
        assert stats["fleet/able"] == 1
        groups = ray.get([fleet.ask.remote(i) for i in range(6)], timeout=60)
        assert {g.policy_version for g in groups} == {3}
        assert ray.get([quick.count.remote(), late.count.remote()]) == [6, 0]
        give_up = time.monotonic() + 60
        while ray.get(fleet.stats.remote())["fleet/able"] < 2 and time.monotonic() < give_up:
            time.sleep(0.2)
        ray.get([fleet.ask.remote(i) for i in range(6)], timeout=60)
        assert ray.get(late.count.remote()) > 0, "once it has loaded it works again"
    finally:
        for actor in (quick, late, fleet):
            ray.kill(actor)


def test_with_all_generators_gone_the_run_fails_in_time_and_says_why(placed: Placed) -> None:
    gone = [Slow.remote(0.0), Slow.remote(0.0)]
    fleet = Asker.remote(gone, deadline_s=5.0, load_timeout_s=2.0)
    try:
        ray.get(fleet.load.remote(1), timeout=60)
        for actor in gone:
            ray.kill(actor)
        started = time.monotonic()
        with pytest.raises(InfraFailure) as caught:
            ray.get(fleet.ask.remote(0), timeout=60)
        assert time.monotonic() - started < 5.0 + 5.0
        told = cluster.own_error(caught.value)
        assert told is not None
        assert "no generator was able to work for 5 s" in told.message
        assert "ActorDiedError" in told.message
        assert told.fix
    finally:
        ray.kill(fleet)


def test_an_actor_that_cannot_be_made_is_one_clear_error(placed: Placed, tmp_path: Path) -> None:
    """The driver gets the generator's own words, not a traceback of another process."""
    policy = placed.config.policy.model_copy(update={"model": str(tmp_path)})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = placed.config.model_copy(
        update={"policy": policy, "run": placed.config.run.model_copy(update={"dir": str(tmp_path)})}
    )
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"workers": 1, "cpus": 0})})
    with pytest.raises(BadInput) as caught, cluster.placed(config, learner=False):
        pass
    assert "llama" in caught.value.message
    assert caught.value.fix
    assert "Traceback" not in str(caught.value)


def test_a_backend_that_is_missing_is_told_when_the_job_starts(placed: Placed, tmp_path: Path) -> None:
    toolbox = placed.config.toolbox.model_copy(update={"segmenter": str(tmp_path / "sam")})
    run = placed.config.run.model_copy(update={"dir": str(tmp_path)})
    engine = placed.config.engine.model_copy(update={"workers": 1, "cpus": 0})
    config = placed.config.model_copy(update={"toolbox": toolbox, "run": run, "engine": engine})
    with pytest.raises(BadInput, match="toolbox.segmenter") as caught, cluster.placed(config, learner=False):
        pass
    assert caught.value.fix


def test_a_job_that_does_not_fit_says_which_part(placed: Placed) -> None:
    config = placed.config.model_copy(update={"engine": placed.config.engine.model_copy(update={"workers": 40, "cpus": 1})})
    with pytest.raises(InfraFailure) as caught:
        cluster.preflight(config, learner=True, rollouts=True)
    assert "engine (generators) 40 x 1" in caught.value.message


def test_versions_are_of_the_run_that_made_them(placed: Placed, tmp_path: Path) -> None:
    """The same folder evaluated from another checkpoint is another policy, whatever an older run left there."""
    first, second = (random_adapter(Path(placed.config.policy.model), seed=i) for i in (11, 12))
    save_adapter(first, tmp_path / "a")
    save_adapter(second, tmp_path / "b")

    def weights(initial: Path) -> tuple[int, str]:
        store = PolicyStore.remote(str(tmp_path / "run"), str(initial))
        with alone(store):
            (ref,) = ray.get(store.get.remote(0))
            count = len(ray.get(store.list.remote()))
            digest = ray.get(ref).sha256()
            ray.get(store.publish.remote(random_adapter(Path(placed.config.policy.model), seed=13), "rft", 1))
        return count, digest

    assert weights(tmp_path / "a") == (1, first.sha256())
    assert weights(tmp_path / "a") == (2, first.sha256()), "a run that goes on keeps its versions"
    assert weights(tmp_path / "b") == (1, second.sha256())
