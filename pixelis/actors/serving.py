"""Places the actors behind a service: memory shards, Embedder, EpisodeService, Evolution and its canary's generator."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from pixelis.actors import cluster, placement, reservations
from pixelis.config import Config


@dataclass
class ServingActors:
    """The actors of a service beside those of every job, and the names by which gateways find them."""

    evolution: ActorHandle | None = None
    canary: ActorHandle | None = None
    embedder: ActorHandle | None = None
    scaler: ActorHandle | None = None
    episodes: ActorHandle | None = None
    memory: list[ActorHandle] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, PlacementGroup] = field(default_factory=dict)

    def all(self) -> list[ActorHandle]:
        return [
            a
            for a in (self.evolution, self.canary, self.embedder, self.episodes, *self.memory)
            if a is not None
        ]


@contextmanager
def online(config: Config, actors: placement.Actors, job: str | None = None) -> Iterator[ServingActors]:
    """Place the actors that ``config`` requires beside ``actors``; kill them at exit.

    ``job``: part of the actors' names. A read-only service has no memory and no Evolution. Raises
    InfraFailure if an actor is not ready within ``cluster.placement_timeout_s``.
    """
    from pixelis.actors.embedder import Embedder
    from pixelis.actors.episode_service import EpisodeService
    from pixelis.actors.generator_scaler import GeneratorScaler
    from pixelis.actors.memory_shard import place_shards

    reservations.preflight(config, learner=config.learns_online, rollouts=True, online=True)
    placed, prefix = ServingActors(), f"{config.run.name}-{job or uuid.uuid4().hex[:6]}"
    embedder = reservations.embedder_bundle(config)
    engine = {"num_cpus": embedder["CPU"], "num_gpus": embedder.get("GPU", 0)}
    try:
        if config.remembers:
            placed.names["memory"], placed.memory = place_shards(config, prefix)
            placed.names["embedder"] = name = f"{prefix}-embedder"
            placed.embedder = cluster.spawn(Embedder, config, name=name, **engine)
        if config.learns_online:
            _start_evolution(config, actors, placed, prefix)
        roles = {
            "memory shard": placed.memory,
            "embedder": [placed.embedder],
            "canary generator": [placed.canary],
            "evolution": [placed.evolution],
        }
        ready = {
            role: [cluster.first_answer(a.health) for a in handles if a is not None]
            for role, handles in roles.items()
        }
        reservations.wait_reserved(placed.groups, config.cluster.placement_timeout_s)
        cluster.wait_ready(ready, config.cluster.placement_timeout_s)
        if config.engine.most_workers > config.engine.workers:
            placed.names["scaler"] = name = f"{prefix}-scaler"
            scaling = config, actors.name, actors.names, actors.store_name, placed.names.get("evolution")
            placed.scaler = cluster.spawn(GeneratorScaler, *scaling, name=name)
        placed.names["episodes"] = name = f"{prefix}-episodes"
        learning = placed.names.get("evolution"), placed.names.get("memory", ())
        hosting = config, actors.names, placed.names.get("scaler"), *learning
        placed.episodes = cluster.spawn(EpisodeService, *hosting, name=name)
        cluster.wait_ready(
            {"episode": [cluster.first_answer(placed.episodes.health)]}, config.cluster.placement_timeout_s
        )
        yield placed
    finally:
        if placed.scaler is not None:
            with contextlib.suppress(RayError, TimeoutError):
                ray.get(placed.scaler.stop.remote(), timeout=10)
            ray.kill(placed.scaler)
        for actor in placed.all():
            ray.kill(actor)
        for group in placed.groups.values():
            reservations.release(group)


def _start_evolution(config: Config, actors: placement.Actors, placed: ServingActors, prefix: str) -> None:
    """Its actors get names, not handles, which live in the object store: their loss would prevent a restart."""
    from pixelis.actors.evolution import Evolution

    canary, name = config.evolution.canary, None
    if canary.enabled:
        name = f"{prefix}-canary"
        bundles = reservations.generator_bundles(config, canary.gpus)
        placed.canary, placed.groups["canary"] = placement.start_generator(
            config, actors.store_name, config.engine.workers, name, reservations.reserve(bundles, name=name)
        )
    scoring, memory = (f"{actors.name}-scorer-0", f"{actors.name}-states-0"), placed.names.get("memory", [])
    placed.names["evolution"] = f"{prefix}-evolution"
    arguments = config, actors.names, actors.store_name, name, memory, scoring
    placed.evolution = cluster.spawn(Evolution, *arguments, name=placed.names["evolution"])
