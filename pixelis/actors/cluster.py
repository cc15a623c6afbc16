"""Joins or starts a Ray cluster; helpers shared by actors and drivers."""

from __future__ import annotations

import errno
import gc
import json
import logging
import operator
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from pixelis import errors, hub
from pixelis.actors.ray_start import BUSY, check_session_folder, check_token_folder, start_failure
from pixelis.config import Config
from pixelis.config.base import leaf_keys
from pixelis.errors import InfraFailure, PixelisError
from pixelis.files import disk_failure, locked
from pixelis.telemetry.progress import stage

WORKER_ENV = ("OMP_NUM_THREADS", "DS_ACCELERATOR", "DS_BUILD_OPS", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE")
"""Variables of the driver's environment that workers get, beside those of FORWARDED."""
FORWARDED = (
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "UCX_",
    "PYTORCH_",
    "VLLM_",
    "WANDB_",
    "MLFLOW_",
    "COMET_",
    "SWANLAB_",
    "TRACKIO_",
    "HF_",
    "RAY_SERVE_",
)
"""Prefixes of the variables that workers get: communication, torch, vLLM, trackers, Hugging Face, Ray Serve."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
"""Marks the names of variables whose values Ray must not write to its logs."""
log = logging.getLogger(__name__)

RESTART_S = 2.0
"""Seconds between two attempts to restart an actor."""
DEFAULT_STORE = 1_000_000_000
SMALLEST_STORE = 80_000_000
"""Bytes of a local object store: by default, and at least (Ray's minimum)."""
LOCAL_ENV = {
    # Ray warns if more than four processes start at once, and a run on a laptop starts more actors.
    "RAY_worker_maximum_startup_concurrency": "8",
    # A local machine is never preempted, and the end of a training run should be noticed within two seconds.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # The head keeps 100,000 ended calls for the dashboard, 3 MB a thousand.
    "RAY_task_events_max_num_task_in_gcs": "1000",
    # Logs are not shown, but Ray would look for new ones ten times a second.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "5",
}
"""Environment of a local cluster. Variables that are already set keep their values."""


def connect(config: Config, store_bytes: int = 0, largest_object: int = 0) -> None:
    """Join the cluster at `cluster.address` or RAY_ADDRESS, else start a local one. Idempotent.

    Raises InfraFailure if no node can hold ``largest_object`` bytes, and with the cause if a cluster cannot
    start.
    """
    if ray.is_initialized():
        return
    address = config.cluster.address or os.environ.get("RAY_ADDRESS")
    address = None if address == "local" else address
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "DS_BUILD_OPS": "0"}
    # Hides the GPUs from processes that reserve none, before any library looks for them.
    env["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"
    forwarded, secrets = worker_variables(config, os.environ)
    env |= forwarded
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.WARNING,
        "namespace": "pixelis",
    }
    inherited: dict[str, str] = {}
    if address:
        # Ray refuses variables that the job was submitted with; its workers have them already.
        job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
        submitted = job.get("runtime_env", {}).get("env_vars", {})
        variables = {name: value for name, value in env.items() if name not in submitted}
        options["runtime_env"] = {"env_vars": variables}
        if secrets := {name: value for name, value in secrets.items() if name not in submitted}:
            # Ray logs and shows the variables of a runtime_env, but not this function.
            options["runtime_env"]["worker_process_setup_hook"] = lambda: os.environ.update(secrets)
    else:
        check_session_folder()
        check_token_folder()
        # Inherited, because a job with a runtime_env cannot use processes that Ray has prestarted.
        inherited = {name: os.environ.get(name, value) for name, value in LOCAL_ENV.items()} | env
        options |= {
            "num_cpus": local_cpus(config),
            "object_store_memory": config.cluster.object_store_bytes or _local_store_bytes(store_bytes),
            "include_dashboard": config.cluster.dashboard,
        }
    handler = signal.getsignal(signal.SIGTERM)
    try:
        doing = f"joining the Ray cluster at {address}" if address else "starting a local Ray cluster"
        stage(doing, config.telemetry.progress)
        with _environment(inherited):
            _start(address, options, config.telemetry.progress)
    except ConnectionError as error:
        raise InfraFailure(
            f"no Ray cluster answers at {address}: {error}",
            fix="start one (`ray start --head`), or unset RAY_ADDRESS and cluster.address",
        ) from None
    if address:
        check_object_stores(ray.nodes(), store_bytes, largest_object)
    _fetch_on_all_nodes(set(config.hub_models.values()))
    # ray.init replaces the handler of SIGTERM; restore the driver's.
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _start(address: str | None, options: dict[str, Any], progress: bool) -> None:
    """Start or join a cluster; a local one again if its processes missed Ray's limits of 15 and 30 s."""
    for is_last in (bool(address), True):
        try:
            ray.init(address=address or "local", **options)
            return
        except ConnectionError:
            raise
        except Exception as error:  # Ray raises plain ones
            failure = start_failure(error, address)
            if is_last or BUSY not in (failure.fix or ""):
                raise failure from None
        stage("the machine is busy: starting Ray again", progress)


def _fetch_on_all_nodes(models: Iterable[str]) -> None:
    """Fetch models of the hub once a node, before actors start. Nodes that join later fetch what they load."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    fetch = ray.remote(num_cpus=0)(hub.fetch)
    try:
        ray.get(
            [
                fetch.options(label_selector={"ray.io/node-id": node}).remote(model)
                for node in nodes
                for model in models
            ]
        )
    except RayTaskError as error:
        raise unwrap_ray_error(error) or error from None


def worker_variables(config: Config, environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The driver's variables that workers get: those that may be logged, and secrets.

    Secrets are passwords, keys and tokens by name, addresses with a password, and what `*_env` keys name.
    """
    keys = {
        str(value)
        for path, *_ in leaf_keys(Config)
        if path.endswith("_env") and (value := operator.attrgetter(path)(config))
    }
    passed = {
        name: value
        for name, value in environment.items()
        if name in keys or name in WORKER_ENV or name.startswith(FORWARDED)
    }
    secret = {
        n: v for n, v in passed.items() if n in keys or SECRET.search(n) or re.search(r"://[^/\s]*@", v)
    }
    return {name: value for name, value in passed.items() if name not in secret}, secret


def local_cpus(config: Config) -> float:
    """CPU slots of a local cluster: at least 4, because most actors wait most of the time."""
    return config.cluster.cpus or max(4, os.cpu_count() or 4)


def _local_store_bytes(needed: int) -> int:
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else needed
    return max(SMALLEST_STORE, min(max(needed, DEFAULT_STORE), int(0.8 * shared)))


def check_object_stores(nodes: Sequence[Mapping[str, Any]], needed: int, largest: int) -> None:
    """Raise InfraFailure if no node's store holds the largest object; warn if all together are too small."""
    sizes = [int(node["Resources"].get("object_store_memory", 0)) for node in nodes if node["Alive"]]
    advice = "start the nodes with `ray start --object-store-memory BYTES` and as much /dev/shm"
    if largest > max(sizes, default=0):
        raise InfraFailure(
            f"a policy version takes {largest / 1e9:.3g} GB, more than the largest object store", fix=advice
        )
    if needed > sum(sizes):
        message = "the object stores have %.3g GB, the job may need %.3g GB: Ray would spill to disk; %s"
        log.warning(message, sum(sizes) / 1e9, needed / 1e9, advice)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def spawn(kind: Any, *arguments: Any, **options: Any) -> ActorHandle:
    return kind.options(**options).remote(*arguments)


def use_reserved_gpus() -> list[str]:
    """Restrict this process to the GPUs that it has reserved, if any; returns their ids.

    Call it before CUDA is used: Ray shows a process that reserved no GPU all GPUs of its node.
    """
    ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)
    return ids


@contextmanager
def repeated_on_restart() -> Iterator[None]:
    """End the process of a restarted actor on a failure, for example while its GPU's memory is not yet free.

    Ray then restarts it again; the exception of a constructor would end the actor for good.
    """
    try:
        yield
    except Exception:
        if not ray.get_runtime_context().was_current_actor_reconstructed:
            raise
        log.exception("the actor could not be restarted, and is restarted again")
        time.sleep(RESTART_S)
        os._exit(1)


def lower_priority(config: Config) -> None:
    """Without a GPU, raise the niceness of this busy process: short requests come first."""
    if not config.engine.gpus:
        os.nice(4)


@contextmanager
def alone_on(gpus: Sequence[str]) -> Iterator[None]:
    """Let one process at a time start on the GPUs of these ids: vLLM counts what others allocate as its own."""
    with ExitStack() as stack:
        for gpu in sorted(gpus):
            stack.enter_context(locked(f"{tempfile.gettempdir()}/pixelis-{os.getuid()}-gpu-{gpu}.lock"))
        yield


def freeze_gc() -> None:
    """Exclude all existing objects from garbage collection: a full collection stops all requests."""
    gc.collect()
    gc.freeze()


def actor_handle(actor: ActorHandle | str, namespace: str | None = None) -> ActorHandle:
    """Handle of an actor, or of the one of this name. Raises InfraFailure if none runs."""
    try:
        return ray.get_actor(actor, namespace) if isinstance(actor, str) else actor
    except ValueError:
        raise InfraFailure(f"no actor named {actor} is running") from None


def first_answer(method: Any) -> ray.ObjectRef:
    """Call a method that may run twice; Ray repeats the call when the connection to a living actor fails."""
    return method.options(max_task_retries=-1).remote()


def wait_ready(roles: dict[str, list[ray.ObjectRef]], timeout_s: float) -> None:
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
                fix="look at `ray status`, or raise cluster.placement_timeout_s",
            )


_TYPED = re.compile(r"pixelis\.errors\.(\w+): (.*?)(?:\n *fix: (.*?))?\s*\Z", re.DOTALL)


def unwrap_ray_error(error: BaseException) -> PixelisError | None:
    """The PixelisError in errors of Ray; a failure of Ray or of a disk as an InfraFailure; else None."""
    pending, failure = [error], None
    while pending:
        inner = pending.pop()
        if isinstance(inner, PixelisError) and not isinstance(inner, RayTaskError):
            return inner
        if isinstance(inner, OSError) and inner.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            return disk_failure(Path(inner.filename or "a file in run.dir"), inner)
        # The error of an actor's constructor is only available as text.
        if isinstance(inner, RayError) and not isinstance(inner, RayTaskError):
            if match := _TYPED.search(str(inner)):
                return getattr(errors, match[1])(match[2], fix=match[3])
            last = str(inner).strip().splitlines()[-1]
            failure = InfraFailure(last, fix="look at `ray status` and at the worker logs of the Ray session")
        causes = [
            inner.__cause__,
            getattr(inner, "cause", None),
            *getattr(inner, "worker_failures", {}).values(),
        ]
        pending += [cause for cause in causes if isinstance(cause, BaseException) and cause is not inner]
    return failure
