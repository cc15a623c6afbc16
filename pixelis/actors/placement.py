"""Places the actors of a job within a timeout, or reports the bundle that does not fit the cluster."""

from __future__ import annotations

import importlib
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle

from pixelis.actors.cluster import connect, spawn, wait_ready
from pixelis.actors.coordinator import Coordinator
from pixelis.actors.embedder import Embedder
from pixelis.actors.generator import Generator
from pixelis.actors.policy_store import PolicyStore
from pixelis.actors.scorer import Scorer
from pixelis.config import Config
from pixelis.errors import InfraFailure
from pixelis.telemetry.progress import stage


@dataclass
class Actors:
    """Actors of a job by role. names: of the generators."""

    store: Any = None
    generators: list[ActorHandle] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    scorers: list[ActorHandle] = field(default_factory=list)
    embedder: Any = None
    coordinator: Any = None
    store_name: str = ""

    def all(self) -> list[ActorHandle]:
        """All actors."""
        single = [a for a in (self.coordinator, self.embedder, self.store) if a is not None]
        return [*self.generators, *self.scorers, *single]


def preflight(config: Config, *, learner: bool, rollouts: bool, online: bool = False) -> None:
    """Raise InfraFailure with the bundles of the job if it needs more resources than the cluster has. online: include serving."""
    bundles: list[tuple[str, int, float, float]] = []
    if rollouts:
        bundles += [
            ("engine (generators)", config.engine.workers, config.engine.cpus, config.engine.gpus),
            ("toolboxes (of the generators)", config.engine.workers * config.toolbox.workers, config.toolbox.cpus, 0),
            ("rewards (scorers)", config.rewards.workers, config.rewards.cpus, 0),
            ("embedder", int(config.rewards.needs_states), config.engine.cpus, config.engine.gpus),
        ]
    if online and config.memory.enabled:
        bundles.append(("memory (shards)", config.memory.shards, config.memory.cpus, 0))
        bundles.append(("embedder (of the memory)", 1, config.engine.cpus, config.engine.gpus))
    if online and config.evolution.enabled and config.evolution.canary.enabled:
        bundles.append(("evolution.canary (generator)", 1, config.evolution.canary.cpus, config.evolution.canary.gpus))
        bundles.append(("toolboxes (of the canary)", config.toolbox.workers, config.toolbox.cpus, 0))
    if learner:
        bundles.append(("learner", config.learner.workers, config.learner.cpus, config.learner.gpus))
    available = ray.cluster_resources()
    for resource, column in (("CPU", 2), ("GPU", 3)):
        total = sum(row[1] * float(row[column]) for row in bundles)
        if total > available.get(resource, 0) and not config.cluster.autoscaling:
            parts = ", ".join(f"{row[0]} {row[1]} x {row[column]:g}" for row in bundles if row[1] and row[column])
            raise InfraFailure(
                f"the job needs {total:g} {resource} ({parts}) but the cluster has {available.get(resource, 0):g}",
                fix="lower the workers or their cpus/gpus in the configuration, add nodes, or set cluster.autoscaling=true",
            )


@contextmanager
def placed(config: Config, *, learner: bool = True, initial: str | None = None, job: str | None = None) -> Iterator[Actors]:
    """Place store, scorers, generators with their toolboxes, and coordinator; kill these on exit.

    initial: checkpoint folder with the adapter of the first version; job: part of the actors' names. Raises InfraFailure if an
    actor is not ready within `cluster.placement_timeout_s`.
    """
    connect(config)
    preflight(config, learner=learner, rollouts=True)
    generators = f"{config.engine.workers} generator{'s' if config.engine.workers > 1 else ''} ({config.engine.name})"
    stage(f"placing {generators}, toolboxes, scorers and the coordinator", config.telemetry.progress)
    actors, job = Actors(), job or uuid.uuid4().hex[:6]
    try:

        def names(role: str, count: int) -> list[str]:
            return [f"{config.run.name}-{job}-{role}-{index}" for index in range(count)]

        (store,) = names("store", 1)
        actors.store_name = store
        actors.names = names("generator", config.engine.workers)
        actors.store = spawn(PolicyStore, config.run.dir, initial, name=store)
        scorers = names("scorer", config.rewards.workers)
        actors.scorers = [
            spawn(Scorer, config, index, name=name, num_cpus=config.rewards.cpus) for index, name in enumerate(scorers)
        ]
        engine = {"num_cpus": config.engine.cpus, "num_gpus": config.engine.gpus}
        actors.generators = [
            spawn(Generator, config, store, index, name=name, **engine) for index, name in enumerate(actors.names)
        ]
        (embedder,) = names("states", 1)
        if config.rewards.needs_states:
            actors.embedder = spawn(Embedder, config, name=embedder, **engine)
        # Names, because handle arguments are kept in the object store, where their loss can make a restart impossible.
        states = embedder if actors.embedder is not None else None
        actors.coordinator = spawn(Coordinator, config, actors.names, scorers, states, num_cpus=0)
        if learner:
            # The import takes seconds, during which this process would only wait.
            threading.Thread(target=importlib.import_module, args=("ray.train.torch",), daemon=True).start()
        ready = {
            "policy store": [actors.store.promoted.remote()],
            "generator": [actor.ready.remote() for actor in actors.generators],
            "scorer": [actor.health.remote() for actor in actors.scorers],
            "embedder": [actors.embedder.health.remote()] if actors.embedder is not None else [],
        }
        wait_ready(ready, config.cluster.placement_timeout_s)
        yield actors
    finally:
        for actor in actors.all():
            ray.kill(actor)
