"""What the tests on real actors share: actors of one job with their configuration, and ways to end one of them."""

from __future__ import annotations

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

from pixelis.actors import cluster, placement
from pixelis.actors.coordinator import Coordinator
from pixelis.config import Config, parse
from pixelis.dialogue.session import SamplingParams
from pixelis.policy.adapters import Adapter
from pixelis.policy.lora import adapted_layers
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint, resolve
from pixelis.records import Group


@dataclass
class Placed:
    """Actors of one job, and what they were placed with."""

    config: Config
    actors: placement.Actors
    adapter: Adapter

    def coordinator(self, **rft: Any) -> Any:
        """A fresh coordinator before the same generators, scorers and store."""
        config = self.config.model_copy(update={"rft": self.config.rft.model_copy(update=rft)})
        a = self.actors
        return cluster.spawn(Coordinator, config, a.generators, a.scorers, num_cpus=0)


def random_adapter(model: str | Path, seed: int, size: float = 0.1) -> Adapter:
    rng = np.random.default_rng(seed)
    policy = parse({"policy": {"model": str(model)}}).policy
    tensors = {}
    for name, layer in adapted_layers(load_model(policy, "cpu")[0], policy.lora.targets).items():
        tensors[f"{name}.A"] = rng.normal(0, size, (4, layer.in_features)).astype(np.float32)
        tensors[f"{name}.B"] = rng.normal(0, size, (layer.out_features, 4)).astype(np.float32)
    return Adapter(tensors, 8, 4, fingerprint(resolve(str(model))))


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


def until(what: Callable[[], Any], timeout_s: float = 60, every_s: float = 0.02) -> float:
    """Seconds until ``what()`` is true; an AssertionError when it never is."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s:g} s"
        time.sleep(every_s)
    return time.monotonic() - began


def health(generator: Any) -> dict[str, Any] | None:
    """What a generator says of itself; None while it is dead or starting."""
    try:
        return dict(ray.get(generator.health.remote(), timeout=30))
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None


def kill(generator: Any) -> int:
    """SIGKILL the process of an actor; its id."""
    pid = int(ray.get(generator.health.remote(), timeout=60)["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def said(generator: Any, version: int) -> list[list[int]]:
    """Greedy tokens of three questions: what the weights of ``version`` write."""
    from pixelis.datasets.questions import read_questions

    ray.get(generator.load.remote(version), timeout=60)
    source = read_questions("cards:?split=validation&seed=1")
    refs = [generator.rollout.remote(next(source), f"probe-{i}", 1, SamplingParams(temperature=0.0))[0] for i in range(3)]
    groups = ray.get(refs, timeout=60)
    assert {g.policy_version for g in groups} == {version}
    return [t.token_ids() for g in groups for t in g.trajectories]


@ray.remote(num_cpus=0, max_concurrency=16)
class Asker:
    """A router with short patience, as the Coordinator holds one, in an actor of its own."""

    def __init__(self, generators: list, rollout_s: float, load_s: float):
        from pixelis.actors.generator_router import GeneratorRouter, RouterTimeouts

        self.router = GeneratorRouter(generators, RouterTimeouts(rollout_s, load_s))

    async def load(self, version: int) -> dict[str, float]:
        await self.router.load(version)
        return self.router.stats()

    async def stats(self) -> dict[str, float]:
        return self.router.stats()

    async def ask(self, number: int) -> tuple[Group, float]:
        """A group of two, and the seconds it took."""
        from pixelis.datasets.questions import read_questions as read

        question, began = next(read("cards:?split=train", start=number)), time.monotonic()
        from pixelis.actors.generator_router import RolloutRequest

        request = RolloutRequest(question, f"g{number}", 2, SamplingParams(max_tokens=12), max_turns=2)
        return (await self.router.rollout(request)).group, time.monotonic() - began
