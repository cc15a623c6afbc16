"""Ray metrics: `reward/accuracy` is `ray_pixelis_reward_accuracy` in Prometheus."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pixelis.telemetry.events import as_number

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
    "evolution/events": (
        "counter",
        ("event", "result"),
        "events of the audit log: promotions, rollbacks, alerts, decisions",
    ),
    "evolution/queue_size": ("gauge", (), "update tasks that wait for the learner"),
    "evolution/queue_fill": ("gauge", (), "filled share of the queue of update tasks"),
    "evolution/unclear_tasks": ("gauge", (), "consecutive tasks of users whose votes are rarely clear"),
    "evolution/gated_votes": ("gauge", (), "consecutive votes below the gate, in the worst gateway"),
    "evolution/vote_collapsed": ("gauge", (), "1 while the votes have collapsed to one answer"),
    "evolution/memory_usage": ("gauge", (), "used share of the memory of Evolution's machine"),
    "evolution/memory_refuses": ("gauge", (), "1 while the disk of the memory stores nothing"),
    "evolution/memory_damaged": ("gauge", (), "experiences found damaged at the last start of the memory"),
    "evolution/update_rate": ("gauge", (), "updates in the last minute, while updates are due"),
    "evolution/mean_kl": ("gauge", (), "mean KL of the last updates"),
    "evolution/p99_latency": ("gauge", (), "p99 seconds of answers, in the slowest gateway"),
    "evolution/faiss_failure_rate": (
        "gauge",
        (),
        "share of searches without every shard, in the worst gateway",
    ),
    "gateway/requests": ("counter", ("route", "status"), "requests by route and status"),
    "gateway/request_seconds": ("histogram", ("route",), "seconds from arrival to the end of the reply"),
    "gateway/inside": ("gauge", ("replica",), "requests that run or wait in a gateway"),
    "gateway/policy_version": ("gauge", ("replica",), "policy version of a gateway's last answer"),
}
"""Metrics of actors: kind, tags, description. docs/metrics.md has those of learners."""

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the buckets of histograms."""

_instruments: dict[tuple[str, str, tuple[str, ...]], Any] = {}


def metric_name(key: str) -> str:
    """`area/name` as a Prometheus name: `reward/accuracy` -> `pixelis_reward_accuracy`."""
    return "pixelis_" + re.sub(r"[^a-zA-Z0-9_]+", "_", key).strip("_").lower()


def publish(values: Mapping[str, Any], tags: Mapping[str, str] | None = None) -> None:
    """Set one Ray gauge per `area/name` key whose value is a finite number. Has no effect outside of Ray."""
    for key, value in values.items():
        if (number := as_number(value)) is not None:
            _instrument("Gauge", key, tags).set(number, tags=dict(tags or {}))


def count(key: str, amount: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
    """Add to a Ray counter (`ray_pixelis_..._total` in Prometheus)."""
    if amount > 0:
        _instrument("Counter", key, tags).inc(amount, tags=dict(tags or {}))


def observe(key: str, seconds: float, tags: Mapping[str, str] | None = None) -> None:
    _instrument("Histogram", key, tags, boundaries=list(SECONDS)).observe(seconds, tags=dict(tags or {}))


def _instrument(kind: str, key: str, tags: Mapping[str, str] | None, **options: Any) -> Any:
    names = tuple(sorted(tags or {}))
    if (kind, key, names) not in _instruments:
        from ray.util import metrics  # loaded on first use: drivers without Ray never need it

        description = ACTOR_METRICS[key][2] if key in ACTOR_METRICS else key
        instrument = getattr(metrics, kind)(
            metric_name(key), description=description, tag_keys=names, **options
        )
        _instruments[kind, key, names] = instrument
    return _instruments[kind, key, names]
