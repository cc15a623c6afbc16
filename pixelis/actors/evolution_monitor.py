"""Watches online evolution: writes the audit log, compares health metrics with thresholds, and alerts."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from pixelis.config import Config
from pixelis.evolution.alerts import Alerter
from pixelis.evolution.audit import FOLDER, AuditLog
from pixelis.evolution.shares import LargestShares, Source
from pixelis.records import UpdateTask
from pixelis.telemetry.metrics import count, publish

log = logging.getLogger(__name__)

AUDITED = ("evolve/kl", "evolve/lr", "evolve/beta", "evolve/confidence", "policy/loss", "policy/grad_norm")
"""Metrics of an update that the audit log has."""

STALE_S = 60.0
"""Age at which the metrics of a gateway are ignored."""


@contextmanager
def log_failures(message: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception(message)


async def repeat(every_s: float, action: Callable[[], Awaitable[Any]], failure: str) -> None:
    """Await ``action`` every ``every_s`` seconds until cancelled; exceptions are logged as ``failure``."""
    while True:
        await asyncio.sleep(every_s)
        with log_failures(failure):
            await action()


class EvolutionMonitor:
    def __init__(self, config: Config, health: Callable[[], dict[str, float]]):
        e = config.evolution
        self.every_s, self.health = e.alerts.every_s, health
        self.log = AuditLog(Path(config.run.dir) / FOLDER, e.audit)
        self.alerter = Alerter(e.alerts, config.run.dir)
        self.reported: dict[str, tuple[float, dict[str, float]]] = {}

    async def note(
        self, event: str, actor: str, action: str, result: str, details: Mapping[str, Any]
    ) -> None:
        """Write an audit event, on disk on return. Raises InfraFailure when the disk refuses."""
        count("evolution/events", tags={"event": event, "result": result})
        await asyncio.to_thread(self.log.write, event, actor, action, result, details)

    async def note_update(
        self,
        step: int,
        tasks: Sequence[UpdateTask],
        sources: Sequence[Source],
        metrics: Mapping[str, float],
        skipped: bool,
    ) -> None:
        numbers = {name.partition("/")[2]: metrics[name] for name in AUDITED if name in metrics}
        details = {
            "step": step,
            "experiences": [id for task in tasks for id in sorted(task.experience_ids) or [task.id]],
            "shares": asdict(LargestShares.of(sources)),
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        }
        await self.note("update", "learner", "step", "skipped" if skipped else "success", details)

    def report(self, metrics: Mapping[str, float], source: str) -> None:
        self.reported[source] = (time.monotonic(), dict(metrics))

    def metrics(self) -> dict[str, float]:
        """The owner's metrics, this machine's memory usage, and the largest recent value of any gateway."""
        result = {**self.health(), "memory_usage": psutil.virtual_memory().percent / 100}
        for reported_at, metrics in self.reported.values():
            if time.monotonic() - reported_at < STALE_S:
                for name, value in metrics.items():
                    result[name] = max(value, result.get(name, value))
        return result

    async def alert(self, metrics: Mapping[str, float]) -> None:
        for alert in await asyncio.to_thread(self.alerter.check, metrics, time.time(), "evolution"):
            details = {"metric": alert.metric, "value": alert.value, "severity": alert.severity}
            await self.note("alert", "evolution", alert.metric, "success", details)

    async def run(self) -> None:
        async def check() -> None:
            metrics = self.metrics()
            publish({f"evolution/{name}": value for name, value in metrics.items()})
            await self.alert(metrics)

        await repeat(self.every_s, check, "checking the health metrics failed")
