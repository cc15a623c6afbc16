"""Compares health metrics with thresholds, and alerts by log, file and webhook, with a cooldown."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pixelis.config import AlertsConfig, ThresholdConfig
from pixelis.errors import BadConfig

log = logging.getLogger(__name__)

FILE = "alerts.jsonl"
RECENT = 200
"""Alerts that are kept in memory."""
WEBHOOK_VARIABLE = "PIXELIS_ALERT_WEBHOOK"
"""Environment variable with the URL that alerts are posted to."""
WEBHOOK_TIMEOUT_S = 5.0
SEVERITY = {"info": 0, "warning": 1, "critical": 2}
LOG_LEVEL = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.CRITICAL}

BUILT_IN = (
    ThresholdConfig(metric="update_rate", at_most=0.0, cooldown_s=600.0),
    ThresholdConfig(metric="faiss_failure_rate", over=0.1, severity="critical"),
    ThresholdConfig(metric="memory_refuses", over=0.0, severity="critical", cooldown_s=3600.0),
    ThresholdConfig(metric="memory_damaged", over=0.0, severity="critical", cooldown_s=86_400.0),
    ThresholdConfig(metric="mean_kl", over=0.2),
    ThresholdConfig(metric="queue_size", over=900.0, cooldown_s=180.0),
    ThresholdConfig(metric="queue_fill", over=0.9, cooldown_s=180.0),
    ThresholdConfig(metric="memory_usage", over=0.9, severity="critical"),
    ThresholdConfig(metric="gated_votes", over=99.0, cooldown_s=3600.0),
    ThresholdConfig(metric="p99_latency", over=2.0, cooldown_s=600.0),
    ThresholdConfig(metric="rollback", over=0.0, severity="critical", cooldown_s=0.0),
    ThresholdConfig(metric="unusable_tasks", over=15.0, severity="critical", cooldown_s=600.0),
    ThresholdConfig(metric="unclear_tasks", over=15.0, cooldown_s=3600.0),
    ThresholdConfig(metric="update_kl", over=0.2),
    ThresholdConfig(metric="learner_failed", over=0.0, severity="critical", cooldown_s=60.0),
)
"""docs/evolution.md explains the metrics and their units."""


@dataclass(frozen=True, slots=True)
class Alert:
    """``value`` of ``metric`` is above ``limit`` (``over``), or at or below it (``at_most``)."""

    time: float
    component: str
    metric: str
    value: float
    side: Literal["over", "at_most"]
    limit: float
    severity: Literal["info", "warning", "critical"]

    @property
    def message(self) -> str:
        side = "above" if self.side == "over" else "at or below"
        return f"{self.severity}: {self.component} {self.metric} is {self.value:g}, {side} {self.limit:g}"


class Alerter:
    """Alerts beyond the built-in thresholds and those of ``config.extra``.

    A restarted process continues from alerts.jsonl in ``folder``. Raises BadConfig if WEBHOOK_VARIABLE holds
    no http(s) URL.
    """

    def __init__(
        self,
        config: AlertsConfig,
        folder: str | Path | None = None,
        environment: Mapping[str, str] = os.environ,
    ):
        self.thresholds = (*BUILT_IN, *config.extra)
        self.file = None if folder is None else Path(folder) / FILE
        self.url = environment.get(WEBHOOK_VARIABLE, "")
        if self.url and not re.match(r"https?://[^/?#]", self.url):
            message = f"{WEBHOOK_VARIABLE} holds no http or https URL"
            raise BadConfig(message, fix=f"export {WEBHOOK_VARIABLE}=https://host/path, or unset it")
        self.posts = ThreadPoolExecutor(1, "alert-webhook")
        self._recent: deque[Alert] = deque(maxlen=RECENT)
        if self.file is not None and self.file.is_file():
            for line in deque(self.file.read_bytes().splitlines(), maxlen=RECENT):
                with contextlib.suppress(ValueError, TypeError, KeyError):  # such as an incomplete line
                    alert = Alert(**json.loads(line))
                    if alert.severity in SEVERITY and alert.time >= 0:
                        self._recent.append(alert)
        self._latest = {(alert.component, alert.metric): alert for alert in self._recent}
        self._lock = threading.Lock()

    def check(
        self, metrics: Mapping[str, float], now: float | None = None, component: str = "service"
    ) -> list[Alert]:
        """Report and return the new alerts of these metrics, of the most severe threshold each.

        The same (component, metric) alerts again after ``cooldown_s``, or at once when the severity rises.
        """
        now = time.time() if now is None else now
        alerts = []
        with self._lock:
            for metric, value in metrics.items():
                exceeded = [t for t in self.thresholds if t.metric == metric and _exceeds(value, t)]
                if not exceeded:
                    continue
                threshold = max(exceeded, key=lambda t: SEVERITY[t.severity])
                previous = self._latest.get((component, metric))
                if (
                    previous is not None
                    and SEVERITY[threshold.severity] <= SEVERITY[previous.severity]
                    and 0 <= now - previous.time < threshold.cooldown_s
                ):
                    continue
                side, limit = (
                    ("at_most", threshold.at_most) if threshold.over is None else ("over", threshold.over)
                )
                alert = Alert(now, component, metric, float(value), side, limit, threshold.severity)  # type: ignore[arg-type]
                self._latest[component, metric] = alert
                self._recent.append(alert)
                self._report(alert)
                alerts.append(alert)
        return alerts

    def recent(self, n: int = 50) -> list[Alert]:
        with self._lock:
            return list(self._recent)[::-1][:n]

    def _report(self, alert: Alert) -> None:
        log.log(LOG_LEVEL[alert.severity], "alert %s", alert.message)
        if self.file is not None:
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with open(self.file, "ab") as file:
                    file.write(json.dumps(asdict(alert)).encode() + b"\n")
            except OSError as error:
                log.warning("cannot append an alert to %s: %s", self.file, error)
        if self.url:
            self.posts.submit(post, self.url, {"text": f"pixelis {alert.message}", **asdict(alert)})


def _exceeds(value: float, threshold: ThresholdConfig) -> bool:
    if threshold.over is not None:
        return value > threshold.over
    return threshold.at_most is not None and value <= threshold.at_most


def post(url: str, body: dict[str, Any]) -> None:
    """Post JSON to the operator's URL. A failure is logged, but not the URL, which may hold a secret."""
    opener = urllib.request.build_opener(_NoRedirect)
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
    )
    try:
        opener.open(request, timeout=WEBHOOK_TIMEOUT_S).close()
    except Exception as error:
        log.warning("the alert webhook failed: %s", type(error).__name__)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would follow one with a GET, and the alert would be lost."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None
