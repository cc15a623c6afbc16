"""Rollouts on real actors: complete groups, versions of weights, errors. Faults: tests/chaos."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from exported import ACTOR_METRICS, missing
from placed_actors import PlacedJob, check_group, placed_job, random_adapter, temporary

from pixelis.actors import cluster, placement
from pixelis.actors.coordinator import RolloutBatch
from pixelis.actors.group_views import fetch_groups
from pixelis.actors.policy_store import PolicyStore
from pixelis.actors.toolbox import Call, Toolbox
from pixelis.datasets.questions import read_questions
from pixelis.errors import BadInput, DataFailure
from pixelis.policy.adapters import save_adapter
from pixelis.records import Action, ImageView
from pixelis.telemetry.metrics import publish

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def placed(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlacedJob]:
    rft = {"steps": 3, "prompts_per_step": 3, "group_size": 2}
    weights = {"accuracy": 1.0, "format": 0.1, "curiosity": 1.0}
    run = tmp_path_factory.mktemp("run")
    with placed_job("nano", run, rft=rft, rewards={"weights": weights}) as job:
        yield job


def learn(
    coordinator: Any, steps: int, world: int, version: int, after: Callable[[int], int] | None = None
) -> list[list[RolloutBatch]]:
    """The batches of a learner by step and rank. after: publishes, returns the version."""
    ray.get(coordinator.begin.remote(0, {}, version), timeout=120)
    batches = []
    for step in range(steps):
        calls = [coordinator.next_batch.remote(rank, world, step) for rank in range(world)]
        batches.append(ray.get(calls, timeout=240))
        version = after(step) if after else version
        ray.get(coordinator.step_done.remote(step, version), timeout=120)
    assert ray.get(coordinator.next_batch.remote(0, world, steps), timeout=60) is None
    return batches


@pytest.mark.parametrize(
    ("groups", "world", "size", "staleness", "steps"), [(1, 2, 2, 0, 2), (2, 3, 3, 1, 3)]
)
def test_groups_are_complete_and_every_question_is_used_once(
    placed: PlacedJob, groups: int, world: int, size: int, staleness: int, steps: int
) -> None:
    questions = groups * world
    rft = {"prompts_per_step": questions, "group_size": size, "max_off_policy_steps": staleness}
    with temporary(placed.coordinator(steps=steps, **rft)) as coordinator:
        batches = learn(coordinator, steps, world, version=0)
    used = []
    for shares in batches:
        assert [len(share.groups) for share in shares] == [groups] * world
        for share in shares:
            assert share.metrics["rollout/staleness"] <= staleness
            used += [g.question.id for g in share.groups]
            for group, views in zip(share.groups, fetch_groups(share.views), strict=True):
                check_group(group, views, size)
    source = read_questions(placed.config.data.train, seed=placed.config.run.seed)
    expected = [next(source).id for _ in range(questions * steps)]
    assert Counter(used) == Counter(expected)
    if staleness == 0:
        assert batches[-1][0].state == {"questions": {"cursor": questions * steps, "ahead": []}}


def test_a_batch_is_rolled_out_with_the_last_published_weights(placed: PlacedJob) -> None:
    adapters = [random_adapter("nano", seed=i) for i in (1, 2)]

    def publish(step: int) -> int:
        return ray.get(placed.actors.store.publish.remote(adapters[step], "rft", step + 1))

    with temporary(placed.coordinator(steps=2)) as coordinator:
        first, second = learn(coordinator, 2, 1, version=0, after=publish)
    assert {g.policy_version for g in first[0].groups} == {0}
    (version,) = {g.policy_version for g in second[0].groups}
    assert version > 0
    states = ray.get([g.health.remote() for g in placed.actors.generators])
    assert {state["version"] for state in states} == {ray.get(placed.actors.store.promoted.remote())}


@pytest.mark.long
def test_bad_questions_end_the_run_with_their_error_without_retries(
    placed: PlacedJob, tmp_path: Path
) -> None:
    bad, broken, row = tmp_path / "bad.jsonl", tmp_path / "broken.jsonl", {"question": "?", "answers": ["1"]}
    bad.write_text(json.dumps(row | {"id": "a"}) + '\n{"id": "b"}\n')
    row["media"] = [{"id": "img0", "uri": f"{tmp_path}/no.png"}]
    broken.write_text("\n".join(json.dumps(row | {"id": str(i)}) for i in range(20)))
    (tmp_path / "no.png").write_bytes(b"no picture")
    for source, kind, words in (
        (bad, BadInput, ("row 2", "column question")),
        (broken, DataFailure, ("image_undecodable",)),
    ):
        data = placed.config.data.model_copy(update={"train": str(source)})
        job = PlacedJob(placed.config.model_copy(update={"data": data}), placed.actors, placed.adapter)
        with temporary(job.coordinator()) as coordinator:
            ray.get(coordinator.begin.remote(0, {}, 0), timeout=60)
            with pytest.raises(kind) as caught:
                ray.get(coordinator.next_batch.remote(0, 1, 0), timeout=60)
            error = cluster.unwrap_ray_error(caught.value)
            assert error is not None
            for word in words:
                assert word in str(error)
            assert "Traceback" not in str(error)


def test_the_driver_raises_the_error_of_a_generator_that_cannot_start(
    placed: PlacedJob, tmp_path: Path
) -> None:
    """The error is the generator's own, without a traceback of another process."""
    policy = placed.config.policy.model_copy(update={"model": str(tmp_path)})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    run = placed.config.run.model_copy(update={"dir": str(tmp_path)})
    engine = placed.config.engine.model_copy(update={"workers": 1, "cpus": 0})
    config = placed.config.model_copy(update={"policy": policy, "run": run, "engine": engine})
    with pytest.raises(BadInput) as caught, placement.placed(config, learner=False):
        pass
    assert "llama" in caught.value.message
    assert caught.value.fix
    assert "Traceback" not in str(caught.value)


@pytest.mark.long
def test_a_run_from_another_checkpoint_discards_the_versions_in_its_folder(
    placed: PlacedJob, tmp_path: Path
) -> None:
    first, second = (random_adapter("nano", seed=i) for i in (11, 12))
    save_adapter(first, tmp_path / "a")
    save_adapter(second, tmp_path / "b")

    def weights(initial: Path) -> tuple[int, str]:
        store = PolicyStore.remote(str(tmp_path / "run"), str(initial))
        with temporary(store):
            (ref,) = ray.get(store.get.remote(0))
            count = len(ray.get(store.list.remote()))
            digest = ray.get(ref).sha256()
            ray.get(store.publish.remote(random_adapter("nano", seed=13), "rft", 1))
        return count, digest

    assert weights(tmp_path / "a") == (1, first.sha256())
    assert weights(tmp_path / "a") == (2, first.sha256()), "a resumed run keeps its versions"
    assert weights(tmp_path / "b") == (1, second.sha256())


@ray.remote(num_cpus=0)
class Learner:
    def step(self, keys: list[str]) -> None:
        publish(dict.fromkeys(keys, 1.0), {"run": "rollouts"})


@pytest.mark.long
def test_the_metrics_of_rollouts_and_steps_are_exported(
    placed: PlacedJob, documented_metrics: dict[str, tuple[re.Pattern[str], bool]]
) -> None:
    steps = [name for name, (_, always) in documented_metrics.items() if always]
    learner = Learner.remote()
    ray.get(learner.step.remote(steps))
    with temporary(placed.coordinator(prompts_per_step=1, group_size=2, steps=1)) as coordinator:
        learn(coordinator, 1, 1, version=0)
    with temporary(cluster.spawn(Toolbox, placed.config, 28, "thousand", num_cpus=0)) as toolbox:
        image = np.zeros((64, 64, 3), np.uint8)
        view = ImageView(id="img0", source_size=(64, 64), view_size=(64, 64))
        call = Call(Action(op="zoom_in", arguments={"box": [0, 0, 500, 500]}), [view], {}, {"img0": 0})
        ray.get(toolbox.execute.remote([call], 10.0, image))
    parts = "rollouts/", "engine/", "scorer/", "toolbox/"
    expected = {key for key in ACTOR_METRICS if key.startswith(parts)} - {"scorer/unscored"}
    assert missing(expected | set(steps)) == set()
