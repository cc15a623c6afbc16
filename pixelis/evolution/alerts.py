"""Alerts: health metrics against thresholds, told to the log, a file and a webhook, and not told again within a cooldown."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pixelis.config import AlertsConfig, ThresholdConfig
from pixelis.errors import BadConfig

log = logging.getLogger(__name__)

FILE = "alerts.jsonl"
KEPT = 200
WEBHOOK_TIMEOUT_S = 5.0
WEBHOOK_QUEUE = 100
LOUDNESS = {"info": 0, "warning": 1, "critical": 2}
LOG_LEVEL = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.CRITICAL}

BUILT_IN = (
    ThresholdConfig(metric="update_rate", at_most=0.0, severity="warning", cooldown_s=600.0),
    ThresholdConfig(metric="faiss_failure_rate", over=0.1, severity="critical", cooldown_s=300.0),
    ThresholdConfig(metric="mean_kl", over=0.2, severity="warning", cooldown_s=300.0),
    ThresholdConfig(metric="queue_size", over=900.0, severity="warning", cooldown_s=180.0),
    ThresholdConfig(metric="queue_fill", over=0.9, severity="warning", cooldown_s=180.0),
    ThresholdConfig(metric="memory_usage", over=0.9, severity="critical", cooldown_s=300.0),
    ThresholdConfig(metric="p99_latency", over=2.0, severity="warning", cooldown_s=600.0),
)
"""Rates and usages 0..1, latency in seconds, KL in nats a token; ``queue_fill`` is queue_size as a share of evolution.queue."""


@dataclass(frozen=True, slots=True)
class Alert:
    """``value`` of ``metric`` in ``component`` is beyond ``limit`` (``over``: above it; ``at_most``: at or below)."""

    time: float
    component: str
    metric: str
    value: float
    side: Literal["over", "at_most"]
    limit: float
    severity: Literal["info", "warning", "critical"]

    @property
    def message(self) -> str:
        """One line for people."""
        side = "above" if self.side == "over" else "at or below"
        return f"{self.severity}: {self.component} {self.metric} is {self.value:g}, {side} {self.limit:g}"


class Alerter:
    """Looks at metrics. ``config.extra`` adds to the built-in thresholds, it replaces none.

    ``folder`` gets alerts.jsonl; None writes no file. Raises BadConfig when the webhook's variable holds no http(s) URL.
    """

    def __init__(self, config: AlertsConfig, folder: str | Path | None = None, environment: Mapping[str, str] | None = None):
        self.thresholds = (*BUILT_IN, *config.extra)
        self.file = None if folder is None else Path(folder) / FILE
        url = (os.environ if environment is None else environment).get(config.webhook_env, "")
        self.webhook = Webhook(url, config.webhook_env) if url else None
        self.counts: Counter[str] = Counter()
        self._told: dict[tuple[str, str], Alert] = {}
        self._recent: deque[Alert] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    def look(self, metrics: Mapping[str, float], now: float | None = None, component: str = "service") -> list[Alert]:
        """The new alerts of these metrics; a metric that is not given, or is no number, is not looked at.

        Of the thresholds that a metric is beyond, the loudest alerts. The same (component, metric) alerts again after its
        threshold's ``cooldown_s``, or at once when it has got louder.
        """
        moment = time.time() if now is None else now
        with self._lock:
            new = []
            for metric, value in metrics.items():
                if math.isnan(value) or (found := self._beyond(metric, value)) is None:
                    continue
                threshold, side, limit = found
                before = self._told.get((component, metric))
                louder = before is None or LOUDNESS[threshold.severity] > LOUDNESS[before.severity]
                if not louder and before is not None and 0 <= moment - before.time < threshold.cooldown_s:
                    self.counts["suppressed"] += 1
                    continue
                alert = Alert(moment, component, metric, float(value), side, limit, threshold.severity)
                self._told[component, metric] = alert
                self._recent.append(alert)
                self.counts[f"severity/{alert.severity}"] += 1
                self.counts[f"component/{component}"] += 1
                new.append(alert)
            for alert in new:
                self._tell(alert)
        return new

    def _beyond(self, metric: str, value: float) -> tuple[ThresholdConfig, Literal["over", "at_most"], float] | None:
        result: tuple[ThresholdConfig, Literal["over", "at_most"], float] | None = None
        for t in self.thresholds:
            if t.metric != metric or (result is not None and LOUDNESS[t.severity] <= LOUDNESS[result[0].severity]):
                continue
            if t.over is not None and value > t.over:
                result = (t, "over", t.over)
            elif t.at_most is not None and value <= t.at_most:
                result = (t, "at_most", t.at_most)
        return result

    def _tell(self, alert: Alert) -> None:
        log.log(LOG_LEVEL[alert.severity], "alert %s", alert.message)
        if self.file is not None:
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with open(self.file, "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(alert), default=str) + "\n")
            except OSError as error:
                self.counts["file_failed"] += 1
                log.warning("%s takes no alert: %s", self.file, error)
        if self.webhook is not None:
            self.webhook.post({"text": f"pixelis {alert.message}", **asdict(alert)})

    def recent(self, n: int = 50) -> list[Alert]:
        """The last ``n`` alerts, newest first."""
        with self._lock:
            return list(self._recent)[::-1][: max(0, n)]

    def statistics(self) -> dict[str, int]:
        """Alerts by severity and component since the start, those suppressed by a cooldown, and what the channels lost."""
        with self._lock:
            hook = self.webhook.counts if self.webhook is not None else {}
            return {**self.counts, **{f"webhook_{key}": count for key, count in hook.items()}}

    def close(self, timeout_s: float = WEBHOOK_TIMEOUT_S) -> None:
        """Give what the webhook has waiting ``timeout_s`` seconds to be posted."""
        if self.webhook is not None:
            self.webhook.close(timeout_s)


class Webhook:
    """Posts JSON to the operator's URL from a thread of its own; a failure is counted and logged, never raised.

    The URL may hold a secret: it is never logged. Redirects are not followed.
    """

    def __init__(self, url: str, variable: str):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadConfig(f"{variable} holds no http or https URL", fix=f"export {variable}=https://host/path, or unset it")
        self.url = url
        self.counts: Counter[str] = Counter()
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(WEBHOOK_QUEUE)
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._thread: threading.Thread | None = None

    def post(self, body: dict[str, Any]) -> None:
        """Queue ``body``; dropped and counted when the receiver is so slow that the queue is full."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="alert-webhook", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(body)
        except queue.Full:
            self.counts["dropped"] += 1

    def _run(self) -> None:
        while (body := self._waiting.get()) is not None:
            try:
                data = json.dumps(body, default=str).encode()
                request = urllib.request.Request(self.url, data, {"content-type": "application/json"}, method="POST")
                with self._opener.open(request, timeout=WEBHOOK_TIMEOUT_S):
                    self.counts["sent"] += 1
            except Exception as error:  # whatever the receiver does, the service goes on
                self.counts["failed"] += 1
                log.warning("the alert webhook failed: %s", type(error).__name__)

    def close(self, timeout_s: float) -> None:
        """End the thread after what is waiting, or after ``timeout_s``."""
        if self._thread is not None and self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=timeout_s)
            except queue.Full:
                return
            self._thread.join(timeout_s)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None
