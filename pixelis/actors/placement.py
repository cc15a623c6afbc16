"""Places the actors of a job in placement groups within a timeout, or reports the part that does not fit."""

from __future__ import annotations

import importlib
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from pixelis.actors.cluster import connect, first_answer, spawn, wait_ready
from pixelis.actors.coordinator import Coordinator
from pixelis.actors.embedder import Embedder
from pixelis.actors.generator import Generator
from pixelis.actors.policy_store import PolicyStore
from pixelis.actors.reservations import (
    bundle,
    embedder_bundle,
    generator_bundles,
    inside,
    may_fit,
    preflight,
    release,
    requested_learners,
    reserve,
    teacher_bundle,
    wait_reserved,
)
from pixelis.actors.scorer import Scorer
from pixelis.actors.teachers import Teacher
from pixelis.config import Config
from pixelis.errors import MissingFile
from pixelis.policy import storage
from pixelis.telemetry.progress import stage


@dataclass
class Actors:
    """Actors of a job by role.

    name: prefix of their names; names: of the generators; teachers: by their model; groups: placement groups
    by name or role of their actors; elastic: generators that may not have started.
    """

    store: Any = None
    generators: list[ActorHandle] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    scorers: list[ActorHandle] = field(default_factory=list)
    embedder: Any = None
    coordinator: Any = None
    teachers: dict[str, ActorHandle] = field(default_factory=dict)
    name: str = ""
    store_name: str = ""
    groups: dict[str, PlacementGroup] = field(default_factory=dict)
    elastic: list[ActorHandle] = field(default_factory=list)

    def all(self) -> list[ActorHandle]:
        single = [a for a in (self.coordinator, self.embedder, self.store) if a is not None]
        return [*self.generators, *self.elastic, *self.scorers, *self.teachers.values(), *single]


ELASTIC_WAIT_S, ELASTIC_PAUSE_S = 2.0, 3.0
"""Seconds to wait for room for a generator beyond `engine.workers`, and until the next attempt."""


def start_generator(
    config: Config, store: str, index: int, name: str, group: PlacementGroup | None = None
) -> tuple[ActorHandle, PlacementGroup]:
    """Start a generator with its toolboxes in a placement group, its own if None, without waiting.

    Without room, the pending group lets an autoscaler add a node. Release it after killing the actor.
    """
    group = group or reserve(generator_bundles(config), name=name)
    return spawn(Generator, config, store, index, name=name, **inside(group, children=True)), group


def object_store_bytes(config: Config) -> tuple[int, int]:
    try:
        return storage.needed_bytes(config)
    except MissingFile:
        return 0, 0


def _start(
    config: Config, actors: Actors, initial: str | None, more: int, teachers: Sequence[str]
) -> list[str]:
    """Request the actors of a job; returns the names of ``more`` generators for later.

    ``teachers``: models that score the policy's tokens.
    """

    def names(role: str, count: int) -> list[str]:
        return [f"{actors.name}-{role}-{index}" for index in range(count)]

    workers, (store,), versions = config.engine.workers, names("store", 1), config.policy_store
    actors.store_name = store
    actors.names, elastic = names("generator", workers), names("generator", workers + more)[workers:]
    retained = versions.newest(config.policy.full), versions.promoted(config.policy.full)
    scorers, (embedder,) = names("scorer", config.rewards.workers), names("states", 1)
    services = [bundle(config.rewards.cpus)] * len(scorers)
    if config.needs_embedder:
        services.append(embedder_bundle(config))
    group = actors.groups["scorers"] = reserve(services, "PACK", f"{actors.name}-scorers")
    # Beside a scorer: Ray would put an actor without resources on the head, whose memory is small.
    beside = {**inside(group), "num_cpus": 0}
    actors.store = spawn(PolicyStore, config.run.dir, initial, *retained, name=store, **beside)
    for index, name in enumerate(actors.names):
        generator, actors.groups[name] = start_generator(config, store, index, name)
        actors.generators.append(generator)
    for index, name in enumerate(scorers):
        actors.scorers.append(spawn(Scorer, config, index, name=name, **inside(group, index)))
    if config.needs_embedder:
        actors.embedder = spawn(Embedder, config, name=embedder, **inside(group, len(scorers)))
    for name, model in zip(names("teacher", len(teachers)), teachers, strict=True):
        group = actors.groups[name] = reserve([teacher_bundle(config, model)], name=name)
        actors.teachers[model] = spawn(Teacher, config, model, name=name, **inside(group))
    # Names: handle arguments are kept in the object store, where their loss can make a restart impossible.
    states = embedder if config.rewards.needs_states else None
    streamed = store if config.policy_store.streams else None
    actors.coordinator = spawn(
        Coordinator, config, actors.names, scorers, states, elastic, streamed, num_cpus=0
    )
    return elastic


def _start_elastic(config: Config, actors: Actors, names: list[str], ended: threading.Event) -> None:
    """Start the elastic generators as there is room, once a learner runs: earlier they could take its place.

    Only an autoscaling cluster gets requests that do not fit: elsewhere they would take a failed learner's
    room.
    """
    bundles = generator_bundles(config)
    with suppress(RayError):  # the job ends
        while not (ended.is_set() or ray.get(actors.coordinator.has_begun.remote())):
            ended.wait(1.0)
        for index, name in enumerate(names, config.engine.workers):
            while not ended.is_set():
                if config.cluster.autoscaling or may_fit(bundles):
                    group = reserve(bundles, name=name)
                    if config.cluster.autoscaling or group.wait(ELASTIC_WAIT_S):
                        generator, _ = start_generator(config, actors.store_name, index, name, group)
                        actors.groups[name] = group
                        actors.elastic.append(generator)
                        break
                    release(group)
                ended.wait(ELASTIC_PAUSE_S)


@contextmanager
def placed(
    config: Config,
    *,
    learner: bool = True,
    initial: str | None = None,
    job: str | None = None,
    online: bool = False,
) -> Iterator[Actors]:
    """Place store, scorers, generators with their toolboxes, and coordinator; kill these on exit.

    initial: checkpoint folder with the adapter of the first version; job: part of the actors' names.
    Generators beyond `engine.workers` join a training run at any time; a service (online) starts them by
    load. Raises InfraFailure for an actor that is late.
    """
    connect(config, *object_store_bytes(config))
    preflight(config, learner=learner, rollouts=True)
    workers = config.engine.workers
    more = config.engine.most_workers - workers if learner and not online else 0
    numbers = f"{workers} to {workers + more}" if more else f"{workers}"
    generators = f"{numbers} generator{'s' if workers + more > 1 else ''} ({config.engine.name})"
    stage(f"placing {generators}, toolboxes, scorers and the coordinator", config.telemetry.progress)
    actors = Actors(name=f"{config.run.name}-{job or uuid.uuid4().hex[:6]}")
    timeout_s = config.cluster.placement_timeout_s
    ended, joining = threading.Event(), None
    learners: dict[str, PlacementGroup] = {}
    try:
        with ExitStack() as held:
            if learner and not config.engine.colocate:
                # Before the generators, which could otherwise split the learners over nodes, but not waited
                # for: an autoscaler then adds the nodes of both at once.
                learners, _ = held.enter_context(requested_learners(config))
            teachers = config.rft.teacher.models if learner and not online else []
            elastic = _start(config, actors, initial, more, teachers)
            wait_reserved({**learners, **actors.groups}, timeout_s)
        if learner:  # this process only waits now: import meanwhile what takes seconds
            threading.Thread(target=importlib.import_module, args=("ray.train.torch",), daemon=True).start()
        ready = {
            "policy store": [first_answer(actors.store.promoted)],
            "generator": [first_answer(actor.ready) for actor in actors.generators],
            "scorer": [first_answer(actor.health) for actor in actors.scorers],
            "embedder": [first_answer(actors.embedder.health)] if actors.embedder is not None else [],
            "teacher": [first_answer(actor.health) for actor in actors.teachers.values()],
        }
        wait_ready(ready, timeout_s)
        if elastic:
            joining = threading.Thread(
                target=_start_elastic, args=(config, actors, elastic, ended), daemon=True
            )
            joining.start()
        yield actors
    finally:
        ended.set()
        if joining is not None:
            joining.join(ELASTIC_WAIT_S + 10)
        for actor in actors.all():
            ray.kill(actor)
        for group in actors.groups.values():
            release(group)
