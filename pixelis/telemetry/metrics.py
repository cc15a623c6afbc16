"""Ray metrics: `reward/accuracy` is `ray_pixelis_reward_accuracy` in Prometheus; docs/monitoring.md lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pixelis.telemetry.events import as_number

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

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
    if amount > 0:
        _instrument("Counter", key, tags).inc(amount, tags=dict(tags or {}))


def observe(key: str, seconds: float, tags: Mapping[str, str] | None = None) -> None:
    _instrument("Histogram", key, tags, boundaries=list(SECONDS)).observe(seconds, tags=dict(tags or {}))


def _instrument(kind: str, key: str, tags: Mapping[str, str] | None, **options: Any) -> Any:
    names = tuple(sorted(tags or {}))
    if (kind, key, names) not in _instruments:
        from ray.util import metrics  # loaded on first use: drivers without Ray never need it

        instrument = getattr(metrics, kind)(metric_name(key), description=key, tag_keys=names, **options)
        _instruments[kind, key, names] = instrument
    return _instruments[kind, key, names]
