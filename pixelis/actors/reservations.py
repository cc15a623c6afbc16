"""Reserves the resources of a job's actors as Ray placement groups, or reports the part that does not fit.

A generator and its toolboxes are one group on one node, so that generators can come and go one at a time.
Learners are on one node if it has room for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
)
from ray.util.placement_group import remove_placement_group as release
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pixelis.config import Config
from pixelis.config.teacher import ADDRESS
from pixelis.errors import BadConfig, InfraFailure

Bundle = dict[str, float]
"""Resources of one process by name: CPU, GPU."""
SMALLEST_CPU = 0.001
"""CPUs reserved for a process that reserves nothing: Ray has no empty bundles."""
RAY_NODE_ID_KEY = "ray.io/node-id"
LEARNER_SHARE = 0.4
"""Share of a GPU that a learner reserves beside a generator: no GPU has room for two generators."""
ONE_NODE_WAIT_S = 2.0
"""Seconds to wait for a node with room for all learners, before they are split over nodes."""


@dataclass(frozen=True)
class Need:
    """``count`` equal parts of a job; the bundles of each share a node."""

    role: str
    count: int
    bundles: tuple[Bundle, ...]

    def total(self, resource: str) -> float:
        return sum(bundle.get(resource, 0.0) for bundle in self.bundles)


def bundle(cpus: float, gpus: float = 0.0) -> Bundle:
    return {"CPU": cpus if cpus or gpus else SMALLEST_CPU, **({"GPU": gpus} if gpus else {})}


def learner_bundle(config: Config) -> Bundle:
    return bundle(config.learner.cpus, config.learner.gpus * (LEARNER_SHARE if config.engine.colocate else 1))


def generator_bundles(config: Config, gpus: float | None = None) -> tuple[Bundle, ...]:
    """Bundles of a generator, with other gpus than the engine's if given, and of its toolboxes."""
    engine, toolbox = config.engine, config.toolbox
    share = 1 - LEARNER_SHARE if engine.colocate else 1
    generator = bundle(engine.cpus, engine.gpus * share if gpus is None else gpus)
    return generator, *([bundle(toolbox.cpus, toolbox.gpus)] * toolbox.workers)


def embedder_bundle(config: Config) -> Bundle:
    return bundle(config.engine.cpus, 0 if config.engine.colocate else min(1.0, config.engine.gpus))


def teacher_bundle(config: Config, name: str) -> Bundle:
    teacher = config.rft.teacher
    return bundle(teacher.cpus, 0 if ADDRESS.fullmatch(name) else teacher.gpus)


def needs(config: Config, *, learner: bool, rollouts: bool, online: bool = False) -> list[Need]:
    """Parts of a job, without generators that may join later. online: include serving.

    Raises BadConfig for a service with a broadcast of versions or, if it learns, with `engine.colocate`.
    """
    if online and config.policy_store.streams:
        message = "a service promotes what is stored: it broadcasts no versions"
        raise BadConfig(message, fix="set policy_store.transfer=object")
    if online and learner and config.engine.colocate:
        message = "with engine.colocate a service could not answer while the learner steps"
        raise BadConfig(message, fix="set engine.colocate=false, or evolution.enabled=false")
    canary, embedder = config.evolution.canary, (embedder_bundle(config),)
    out: list[Need] = []
    if rollouts:
        out += [
            Need("generator with its toolboxes", config.engine.workers, generator_bundles(config)),
            Need("scorer", config.rewards.workers, (bundle(config.rewards.cpus),)),
            Need("embedder", int(config.needs_embedder), embedder),
        ]
    if online and config.remembers:
        out += [
            Need("memory shard", config.memory.shards, (bundle(config.memory.cpus, config.memory.gpus),)),
            Need("embedder of the memory", 1, embedder),
        ]
    if online and config.learns_online and canary.enabled:
        out.append(Need("canary with its toolboxes", 1, generator_bundles(config, canary.gpus)))
    if learner and rollouts and not online:
        models = config.rft.teacher.models
        out += [Need(f"teacher {name}", 1, (teacher_bundle(config, name),)) for name in models]
    if learner:
        out.append(Need("learner", config.learner.workers, (learner_bundle(config),)))
    return [need for need in out if need.count]


def preflight(config: Config, *, learner: bool, rollouts: bool, online: bool = False) -> None:
    """Raise InfraFailure with the parts of a job that exceed the cluster or each of its nodes.

    Does nothing for a cluster that can add nodes.
    """
    if config.cluster.autoscaling:
        return
    parts, nodes = needs(config, learner=learner, rollouts=rollouts, online=online), node_resources()
    for resource in ("CPU", "GPU"):
        total = sum(p.count * p.total(resource) for p in parts)
        available = sum(n.get(resource, 0.0) for n in nodes.values())
        # The bundles of processes that reserve nothing may exceed the cluster.
        if total > available + SMALLEST_CPU * sum(p.count * len(p.bundles) for p in parts):
            shares = ", ".join(
                f"{p.role} {p.count} x {p.total(resource):g}" for p in parts if p.total(resource)
            )
            raise InfraFailure(
                f"the job needs {total:g} {resource} ({shares}) but the cluster has {available:g}",
                fix="lower workers or their cpus/gpus, add nodes, or set cluster.autoscaling=true",
            )
    for part in parts:
        if not any(_fits(part.bundles, node) for node in nodes.values()):
            raise InfraFailure(
                f"a {part.role} needs {describe(part.bundles)} on one node, but the nodes have "
                f"{_describe_nodes(nodes)}",
                fix="lower the cpus/gpus of that part, or add a larger node",
            )


def node_resources() -> dict[str, dict[str, float]]:
    return {
        f"{n['NodeManagerAddress']} ({n['NodeID'][:6]})": n["Resources"] for n in ray.nodes() if n["Alive"]
    }


def _fits(bundles: Sequence[Bundle], node: Mapping[str, float]) -> bool:
    slack = SMALLEST_CPU * len(bundles)
    return all(
        sum(b.get(name, 0.0) for b in bundles) <= node.get(name, 0.0) + slack for name in ("CPU", "GPU")
    )


def describe(bundles: Sequence[Bundle]) -> str:
    """Sum of bundles, for messages: `CPU 2, GPU 1`."""
    totals = {name: sum(b.get(name, 0.0) for b in bundles) for name in ("CPU", "GPU")}
    parts = [f"{name} {total:g}" for name, total in totals.items() if total > SMALLEST_CPU * len(bundles)]
    return ", ".join(parts) or "a process"


def _describe_nodes(nodes: Mapping[str, Mapping[str, float]]) -> str:
    return "; ".join(
        f"{name}: CPU {node.get('CPU', 0):g}, GPU {node.get('GPU', 0):g}" for name, node in nodes.items()
    )


def describe_cluster() -> str:
    free = ray.available_resources()
    nodes = _describe_nodes(node_resources())
    return f"nodes: {nodes}; free in all of them: CPU {free.get('CPU', 0):g}, GPU {free.get('GPU', 0):g}"


# -- groups


def reserve(bundles: Sequence[Bundle], strategy: str = "STRICT_PACK", name: str = "") -> PlacementGroup:
    """Request a group, without waiting. It ends with the driver that requests it, or by `release`.

    Replaces a group of the same name: that of an actor that was killed outlives it.
    """
    if name:
        with suppress(ValueError):  # the usual case: there is none
            release(get_placement_group(name))
    return placement_group(list(bundles), strategy=strategy, name=name)


def may_fit(bundles: Sequence[Bundle]) -> bool:
    return _fits(bundles, ray.available_resources())


def wait_reserved(groups: Mapping[str, PlacementGroup], timeout_s: float) -> None:
    """Wait for groups by role. Raises InfraFailure with the first that does not fit, and why."""
    deadline = time.monotonic() + timeout_s
    for role, group in groups.items():
        if not group.wait(max(0.0, deadline - time.monotonic())):
            raise InfraFailure(
                f"{role} does not fit: it needs {describe(group.bundle_specs)} ({timeout_s:g} s; {describe_cluster()})",
                fix="look at `ray status`, lower cpus/gpus, add nodes, or raise cluster.placement_timeout_s",
            )


def inside(group: PlacementGroup, index: int = 0, *, children: bool = False) -> dict[str, Any]:
    """Options of an actor that uses a bundle of a group; `children`: so do the actors that it starts."""
    resources = group.bundle_specs[index]
    strategy = PlacementGroupSchedulingStrategy(group, index, placement_group_capture_child_tasks=children)
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "scheduling_strategy": strategy,
    }


class Room(NamedTuple):
    """Room for learners: strategy and node labels of Ray Train's placement group."""

    workers: int
    strategy: str
    labels: list[dict[str, str]] | None = None


@contextmanager
def requested_learners(config: Config, job: str = "") -> Iterator[tuple[dict[str, PlacementGroup], Room]]:
    """Request room for the learners during the block: on one node if possible, colocated beside generators of `job`.

    Yields their group by role, for `wait_reserved`. Leave the block before Ray Train makes its own reservation.
    """
    group, room = _reserve_learners(config, config.learner.workers, job)
    try:
        role = "the learner" if room.workers == 1 else f"the group of {room.workers} learners"
        yield {role: group}, room
    finally:
        release(group)


def fitting_learners(config: Config, counts: Sequence[int], wait_s: float, job: str = "") -> Room | None:
    """Room for the first of these numbers of learners that fits, within `wait_s` for each; None if none does."""
    for count in counts:
        group, room = _reserve_learners(config, count, job)
        fits = group.wait(wait_s)
        release(group)
        if fits:
            return room
    return None


def _reserve_learners(config: Config, count: int, job: str) -> tuple[PlacementGroup, Room]:
    bundles = [learner_bundle(config)] * count
    if config.engine.colocate and config.learner.gpus:
        nodes = [
            row["bundles_to_node_id"][0]
            for row in placement_group_table().values()
            if row["name"].startswith(f"{job}-generator-") and row["state"] == "CREATED"
        ]
        labels = [{RAY_NODE_ID_KEY: node} for node in nodes[:count]]
        if len(labels) == count:
            group = placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
            return group, Room(count, "PACK", labels)
    elif any(_fits(bundles, node) for node in node_resources().values()):
        group = reserve(bundles, "STRICT_PACK")
        if group.wait(ONE_NODE_WAIT_S):
            return group, Room(count, "STRICT_PACK")
        release(group)
    return reserve(bundles, "PACK"), Room(count, "PACK")
