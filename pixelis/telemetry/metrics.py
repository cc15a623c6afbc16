"""Live metrics: Ray metrics for the dashboard and Prometheus, and trackers.

Metric keys are `area/name` (`reward/accuracy`); Prometheus shows the same number as `ray_pixelis_reward_accuracy` (Ray adds its
prefix). A tracker that fails is dropped with one warning, and the run continues without it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pixelis.errors import MissingDependency
from pixelis.telemetry.events import as_number
from pixelis.telemetry.trackers import OpenedRun

if TYPE_CHECKING:
    from pixelis.config import Config

log = logging.getLogger("pixelis.telemetry")

ACTOR_METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "rollouts/groups": (
        "counter",
        ("outcome",),
        "groups that ended: kept, uninformative, abstained or a cause",
    ),
    "rollouts/group_seconds": ("histogram", (), "seconds from admission to the score of a group"),
    "engine/groups": ("counter", ("generator",), "groups generated"),
    "engine/episodes": ("counter", ("generator",), "episodes generated"),
    "engine/tokens": ("counter", ("generator",), "tokens of the policy's turns"),
    "engine/running": ("gauge", ("generator",), "groups that are being generated"),
    "engine/version": ("gauge", ("generator",), "policy version of the last group"),
    "toolbox/calls": ("counter", ("operation", "status"), "operations executed, by status: ok or error"),
    "toolbox/seconds": ("counter", ("operation",), "seconds spent in operations"),
    "scorer/groups": ("counter", (), "groups scored"),
    "scorer/seconds": ("counter", (), "seconds spent scoring"),
    "scorer/unscored": ("counter", ("cause",), "episodes without a reward, by cause"),
    "memory/searches": ("counter", ("shard",), "searches of a shard"),
    "memory/search_seconds": ("counter", ("shard",), "seconds spent searching"),
    "memory/added": ("counter", ("shard",), "experiences stored"),
    "memory/experiences": ("gauge", ("shard",), "experiences in a shard"),
    "memory/bytes": ("gauge", ("shard",), "bytes of a shard on disk"),
    "evolution/version": ("gauge", (), "policy version that is served"),
    "evolution/updates": ("gauge", (), "updates applied since the service started"),
    "evolution/events": ("counter", ("event", "result"), "events of the audit log: promotions, rollbacks, alerts, decisions"),
    "evolution/queue_size": ("gauge", (), "update tasks that wait for the learner"),
    "evolution/queue_fill": ("gauge", (), "filled share of the queue of update tasks"),
    "evolution/unclear_tasks": (
        "gauge",
        (),
        "tasks in a row of users whose votes are rarely clear, from which nothing is learnt",
    ),
    "evolution/gated_votes": ("gauge", (), "votes in a row below the gate, of the gateway with the most"),
    "evolution/vote_collapsed": ("gauge", (), "1 while the votes have collapsed to one answer"),
    "evolution/memory_usage": ("gauge", (), "used share of the memory of the machine that Evolution is on"),
    "evolution/memory_refuses": ("gauge", (), "1 while the disk of the memory stores nothing, as a gateway sees it"),
    "evolution/memory_damaged": ("gauge", (), "experiences that the last start of the memory found damaged"),
    "evolution/update_rate": ("gauge", (), "updates in the last minute, while updates are due"),
    "evolution/mean_kl": ("gauge", (), "mean KL of the last updates to the policy before them"),
    "evolution/p99_latency": ("gauge", (), "99th percentile of the seconds of answers, of the slowest gateway"),
    "evolution/faiss_failure_rate": ("gauge", (), "share of searches without the answer of every shard, of the worst gateway"),
    "gateway/requests": ("counter", ("route", "status"), "requests by route and status"),
    "gateway/request_seconds": ("histogram", ("route",), "seconds from arrival to the end of the reply"),
    "gateway/inside": ("gauge", ("replica",), "requests that run or wait in a gateway"),
    "gateway/policy_version": ("gauge", ("replica",), "policy version of a gateway's last answer"),
}
"""Metrics of actors: key -> kind, tags, description. Learners also publish the metrics of each step (docs/metrics.md)."""

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the buckets of histograms."""

_gauges: dict[tuple[str, tuple[str, ...]], Any] = {}
_counters: dict[tuple[str, tuple[str, ...]], Any] = {}
_histograms: dict[tuple[str, tuple[str, ...]], Any] = {}


def metric_name(key: str) -> str:
    """`area/name` as a Prometheus name: `reward/accuracy` -> `pixelis_reward_accuracy`."""
    return "pixelis_" + re.sub(r"[^a-zA-Z0-9_]+", "_", key).strip("_").lower()


def publish(values: Mapping[str, Any], tags: Mapping[str, str] | None = None) -> None:
    """Set one Ray gauge per `area/name` key, for the values that are finite numbers.

    Works in an actor, a task or a driver connected to Ray; elsewhere it has no effect. A key must always have the same tag names.
    """
    for key, value in values.items():
        if (number := as_number(value)) is not None:
            _instrument(_gauges, "Gauge", key, tags).set(number, tags=dict(tags or {}))


def count(key: str, amount: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
    """Add to a Ray counter (`ray_pixelis_..._total` in Prometheus). Amounts of zero or less are ignored."""
    if amount > 0:
        _instrument(_counters, "Counter", key, tags).inc(amount, tags=dict(tags or {}))


def observe(key: str, seconds: float, tags: Mapping[str, str] | None = None) -> None:
    """Add a duration to a Ray histogram (`ray_pixelis_..._bucket`, `_sum` and `_count` in Prometheus)."""
    _instrument(_histograms, "Histogram", key, tags, boundaries=list(SECONDS)).observe(seconds, tags=dict(tags or {}))


def _instrument(
    instruments: dict[tuple[str, tuple[str, ...]], Any], kind: str, key: str, tags: Mapping[str, str] | None, **options: Any
) -> Any:
    names = tuple(sorted(tags or {}))
    if (key, names) not in instruments:
        from ray.util import metrics  # loaded on first use: drivers without Ray never need it

        instruments[key, names] = getattr(metrics, kind)(
            metric_name(key), description=ACTOR_METRICS[key][2] if key in ACTOR_METRICS else key, tag_keys=names, **options
        )
    return instruments[key, names]


PACKAGES = {
    "wandb": "wandb",
    "tensorboard": "tensorboardX",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "comet": "comet_ml",
    "trackio": "trackio",
}
"""Tracker in `config.telemetry` -> the package that it requires."""


def require_trackers(config: Config) -> None:
    """Raise MissingDependency for a tracker that is configured but not installed; called before a run starts."""
    for name, package in PACKAGES.items():
        if getattr(config.telemetry, name) and importlib.util.find_spec(package) is None:
            raise _not_installed(name)


def _not_installed(name: str) -> MissingDependency:
    package = PACKAGES[name]
    return MissingDependency(f"{package} is not installed", fix=f"pip install {package}, or telemetry.{name}=false")


ARTIFACT_BYTES = 2**30
"""Size up to which the files of a result are uploaded, not only its metadata."""


class Sink(Protocol):
    """A destination of metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step."""

    def close(self) -> None:
        """Flush and close."""


class Tracker:
    """Sends a driver's metrics to the sinks of `config.telemetry`.

    `with Tracker(config) as tracker: tracker.log(step, {"reward/accuracy": 0.4})`.

    Weights & Biases works offline: without an API key, without a network or with WANDB_MODE=offline it writes to `run.dir/wandb`,
    which `wandb sync` uploads later. With a key, a job that resumes `run.dir` also resumes the W&B run.
    resumed: step that the run continues from; TensorBoard hides what later steps logged before, W&B keeps it for their replay.
    only: the sinks to open, of those configured.
    """

    def __init__(self, config: Config, resumed: int | None = None, only: Container[str] = PACKAGES):
        self._sinks: dict[str, Sink] = {}
        kinds: dict[str, type[Wandb | TensorBoard]] = {"wandb": Wandb, "tensorboard": TensorBoard}
        for name in PACKAGES:
            if name in only and getattr(config.telemetry, name):
                try:
                    self._sinks[name] = kinds[name](config, resumed) if name in kinds else OpenedRun(name, config)
                except ImportError as error:
                    self._drop(name, _not_installed(name) if error.name == PACKAGES[name] else error)
                except Exception as error:  # a tracker may fail in any way and must not end the run
                    self._drop(name, error)

    @property
    def sinks(self) -> list[str]:
        """Names of the working sinks."""
        return list(self._sinks)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the finite numbers of a step; steps must not decrease."""
        numbers = {key: number for key, value in values.items() if (number := as_number(value)) is not None}
        for name, sink in list(self._sinks.items()):
            try:
                sink.log(step, numbers)
            except Exception as error:
                self._drop(name, error)

    def artifact(self, name: str, kind: str, path: Path, metadata: Mapping[str, Any]) -> None:
        """Log a result and its metadata to Weights & Biases."""
        if isinstance(sink := self._sinks.get("wandb"), Wandb):
            try:
                sink.artifact(name, kind, path, metadata)
            except Exception as error:
                self._drop("wandb", error)

    def close(self) -> None:
        """Close all sinks."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.close()
            except Exception as error:
                self._drop(name, error)
        self._sinks.clear()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _drop(self, name: str, error: Exception) -> None:
        self._sinks.pop(name, None)
        log.warning("tracker %s failed and is off for the rest of this run: %s: %s", name, type(error).__name__, error)


class Wandb:
    """Weights & Biases, offline without an API key."""

    def __init__(self, config: Config, resumed: int | None = None):
        try:
            import wandb
        except ImportError:
            raise _not_installed("wandb") from None
        folder = Path(config.run.dir).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        arguments: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", "pixelis"),
            "name": config.run.name,
            "id": hashlib.sha256(f"{folder}:{config.run.name}:{config.run.seed}".encode()).hexdigest()[:16],
            "dir": str(folder),
            "config": config.model_dump(mode="json"),
            "settings": wandb.Settings(init_timeout=30, silent=True, console="off"),
        }
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        try:
            self._run = wandb.init(mode=mode, resume="allow" if mode == "online" else None, **arguments)
        except wandb.Error as error:
            if mode != "online":
                raise
            log.warning("cannot reach Weights & Biases, writing offline instead: %s", str(error).splitlines()[0])
            self._run = wandb.init(mode="offline", **arguments)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def artifact(self, name: str, kind: str, path: Path, metadata: Mapping[str, Any]) -> None:
        """Log the files of a result up to ARTIFACT_BYTES; of a larger one only the metadata, which include its hash."""
        import wandb

        artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "-", name), type=kind, metadata=dict(metadata))
        files = [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.is_file()]
        if sum(file.stat().st_size for file in files) <= ARTIFACT_BYTES:
            for file in files:
                artifact.add_file(str(file), name=file.name if path.is_file() else file.relative_to(path).as_posix())
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()


class TensorBoard:
    """TensorBoard event files in `run.dir/tensorboard`, written by tensorboardX."""

    def __init__(self, config: Config, resumed: int | None = None):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise _not_installed("tensorboard") from None
        purge = resumed + 1 if resumed is not None else None
        self._writer = SummaryWriter(logdir=str(Path(config.run.dir) / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()
