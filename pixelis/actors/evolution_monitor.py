"""Monitors online evolution: audit log, health metrics against thresholds, alerts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from pixelis.config import Config, ThresholdConfig
from pixelis.errors import PixelisError
from pixelis.evolution.alerts import Alerter
from pixelis.evolution.audit import FOLDER, AuditLog

log = logging.getLogger(__name__)

OWN = [
    ThresholdConfig(metric="rollback", over=0.0, severity="critical", cooldown_s=0.0),
    ThresholdConfig(metric="vote_collapsed", over=0.0, severity="critical", cooldown_s=600.0),
    ThresholdConfig(metric="learner_failed", over=0.0, severity="critical", cooldown_s=60.0),
]
"""Thresholds of what only the Evolution actor knows."""

STALE_S = 60.0
"""Age at which what a gateway told says nothing any more."""


@contextmanager
def log_failures(told: str) -> Iterator[None]:
    """What failed once must not have been the last time that it was tried."""
    try:
        yield
    except Exception:
        log.exception(told)


async def repeat(every_s: float, action: Callable[[], Awaitable[Any]], failure: str) -> None:
    """Await ``action`` every ``every_s`` seconds, for ever; one that fails is logged as ``failure``."""
    while True:
        await asyncio.sleep(every_s)
        with log_failures(failure):
            await action()


class EvolutionMonitor:
    """Audit and alerts in ``run.dir``; ``health`` gives the metrics of its owner.

    Raises BadInput when another writer holds the audit log or its last line cannot be continued.
    """

    def __init__(self, config: Config, health: Callable[[], dict[str, float]]):
        e = config.evolution
        self.every_s, self.health = e.alerts.every_s, health
        self.log = AuditLog(Path(config.run.dir) / FOLDER, e.audit)
        self.alerter = Alerter(e.alerts.model_copy(update={"extra": [*OWN, *e.alerts.extra]}), config.run.dir)
        self.heard: dict[str, tuple[float, dict[str, float]]] = {}

    async def note(self, event: str, actor: str, action: str, result: str, details: Mapping[str, Any]) -> None:
        """An event that is on disk when this returns. Raises InfraFailure when the disk refuses."""
        await asyncio.to_thread(self.log.write, event, actor, action, result, details)

    def recent_audit(self, n: int) -> list[dict[str, Any]]:
        """The last ``n`` audit events, newest first."""
        return [asdict(event) for event in self.log.recent(n)]

    def told(self, metrics: Mapping[str, float], source: str) -> None:
        """What ``source`` measured; it replaces what it told before."""
        self.heard[source] = (time.monotonic(), dict(metrics))

    def metrics(self) -> dict[str, float]:
        """Own health, use of memory of this machine (0..1), and the largest that any gateway told of late."""
        result = {**self.health(), "memory_usage": psutil.virtual_memory().percent / 100}
        for when, metrics in self.heard.values():
            if time.monotonic() - when < STALE_S:
                for name, value in metrics.items():
                    result[name] = max(value, result.get(name, value))
        return result

    async def alert(self, metrics: Mapping[str, float]) -> None:
        """Alert on what is beyond its threshold, and note that it was."""
        for alert in await asyncio.to_thread(self.alerter.look, metrics, time.time(), "evolution"):
            about = {"metric": alert.metric, "value": alert.value, "severity": alert.severity}
            await self.note("alert", "evolution", alert.metric, "success", about)

    async def run(self) -> None:
        """Look every ``alerts.every_s`` seconds, for ever."""
        while True:
            await asyncio.sleep(self.every_s)
            try:
                await self.alert(self.metrics())
            except (PixelisError, OSError):
                log.exception("the health metrics could not be looked at")
