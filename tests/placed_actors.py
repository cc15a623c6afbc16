"""The placed actors of one job, checks of groups, and ways to kill an actor."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorUnavailableError

from pixelis.actors import cluster, placement
from pixelis.actors.coordinator import Coordinator
from pixelis.config import Config, parse
from pixelis.dialogue.session import SamplingParams
from pixelis.policy.adapters import Adapter, save_adapter
from pixelis.policy.lora import adapted_layers
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint, resolve
from pixelis.records import Group


@dataclass
class PlacedJob:
    """The actors of one job with its configuration and initial adapter."""

    config: Config
    actors: placement.Actors
    adapter: Adapter

    def coordinator(self, **rft: Any) -> Any:
        """Start another coordinator on the same actors. rft: changed configuration values."""
        config = self.config.model_copy(update={"rft": self.config.rft.model_copy(update=rft)})
        a = self.actors
        return cluster.spawn(Coordinator, config, a.generators, a.scorers, num_cpus=0)


@contextmanager
def placed_job(model: str | Path, run: Path, **parts: Any) -> Iterator[PlacedJob]:
    """Two generators of a model with a random adapter, and a scorer. parts: of the configuration."""
    config = parse(
        {
            "run": {"dir": str(run), "name": run.name},
            "policy": {"model": str(model), "lora": {"rank": 4, "alpha": 8}},
            "engine": {"workers": 2},
            "dialogue": {"max_turn_tokens": 12},
            **parts,
        }
    )
    adapter, start = random_adapter(model, seed=0), run / "start" / "step_00000007"
    save_adapter(adapter, start)
    with placement.placed(config, learner=False, initial=str(start)) as actors:
        yield PlacedJob(config, actors, adapter)


def random_adapter(model: str | Path, seed: int, size: float = 0.1) -> Adapter:
    """Return a random adapter of rank 4 for a model."""
    rng = np.random.default_rng(seed)
    policy = parse({"policy": {"model": str(model)}}).policy
    tensors = {}
    for name, layer in adapted_layers(load_model(policy, "cpu")[0], policy.lora.targets).items():
        tensors[f"{name}.A"] = rng.normal(0, size, (4, layer.in_features)).astype(np.float32)
        tensors[f"{name}.B"] = rng.normal(0, size, (layer.out_features, 4)).astype(np.float32)
    return Adapter(tensors, 8, 4, fingerprint(resolve(str(model))))


@contextmanager
def temporary(actor: Any) -> Iterator[Any]:
    """Kill the actor at the end of the block."""
    try:
        yield actor
    finally:
        ray.kill(actor)


def check_group(group: Group, views: dict[str, list[np.ndarray]], size: int) -> None:
    """Trajectories belong to the group's question, views match their images, and advantages sum to 0."""
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


def wait_until(condition: Callable[[], Any], timeout_s: float = 60, every_s: float = 0.02) -> float:
    """Return the seconds until ``condition()`` is true. AssertionError after ``timeout_s``."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s:g} s"
        time.sleep(every_s)
    return time.monotonic() - start


def restart(actor: Any) -> None:
    """Kill the process of an actor and wait for another one: a kill returns before the process has ended."""

    def process() -> int | None:
        try:
            return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60))
        except ActorUnavailableError:
            return None

    before = process()
    ray.kill(actor, no_restart=False)
    wait_until(lambda: process() not in (None, before), 90)


def store_stats() -> Any:
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    return get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats


def stored_bytes() -> int:
    """Return all bytes that were ever put into the object store of this node."""
    return int(store_stats().cumulative_created_bytes)


def held_bytes() -> int:
    """Return the bytes of the objects that are in the object store of this node."""
    gc.collect()
    return int(store_stats().object_store_bytes_used)


def health(generator: Any) -> dict[str, Any] | None:
    """Return the health of a generator; None while it is dead or starting."""
    try:
        return dict(ray.get(generator.health.remote(), timeout=30))
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None


def kill(generator: Any) -> int:
    """Send SIGKILL to the process of a generator; return its id."""
    pid = int(ray.get(generator.health.remote(), timeout=60)["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def greedy_tokens(generator: Any, version: int) -> list[list[int]]:
    """Return the greedy tokens of three questions with the weights of ``version``."""
    from pixelis.actors.generator_router import RolloutRequest
    from pixelis.datasets.questions import read_questions

    ray.get(generator.load.remote(version), timeout=60)
    source = read_questions("cards:?split=validation&seed=1")
    requests = [
        RolloutRequest(next(source), f"probe-{i}", 1, SamplingParams(temperature=0.0), views=False)
        for i in range(3)
    ]
    refs = [generator.rollout.remote(request)[0] for request in requests]
    groups = ray.get(refs, timeout=60)
    assert {g.policy_version for g in groups} == {version}
    return [t.token_ids() for g in groups for t in g.trajectories]


@ray.remote(num_cpus=0, max_concurrency=16)
class RouterActor:
    """A GeneratorRouter with short timeouts in its own actor."""

    def __init__(self, generators: list, rollout_s: float, load_s: float):
        from pixelis.actors.generator_router import GeneratorRouter, RouterTimeouts

        self.router = GeneratorRouter(generators, RouterTimeouts(rollout_s, load_s))

    async def load(self, version: int) -> dict[str, float]:
        await self.router.load(version)
        return self.router.stats()

    async def stats(self) -> dict[str, float]:
        return self.router.stats()

    async def rollout(self, number: int) -> tuple[Group, float]:
        """Return a group of two rollouts and its seconds."""
        from pixelis.actors.generator_router import RolloutRequest
        from pixelis.datasets.questions import read_questions

        question, start = next(read_questions("cards:?split=train", start=number)), time.monotonic()
        request = RolloutRequest(question, f"g{number}", 2, SamplingParams(max_tokens=12), max_turns=2)
        return (await self.router.rollout(request)).group, time.monotonic() - start
