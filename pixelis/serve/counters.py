"""The metrics of a gateway replica in Prometheus format."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pixelis.telemetry.metrics import count, observe, publish

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RECENT = 10_000
"""Answers that ``health`` looks back on."""
MIN_SEARCHES = 10
"""Fewest searches for a failure rate: the first one after a start is often late."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Counters(Collector):
    """Requests by route and status, their durations, and the values of ``read`` at each scrape.

    Those are counters unless in ``GAUGES``. A scrape of the service's address reaches any replica, so each
    metric names it.
    """

    GAUGES: Mapping[str, str] = {
        "inside": "requests that run or wait",
        "policy_version": "policy version of the last answer",
        "decoded_bytes": "size of the decoded pictures of requests",
        "cache_entries": "cached replies",
        "cache_bytes": "bytes of cached replies",
    }

    def __init__(self, replica: str, read: Callable[[], Mapping[str, float]]):
        self.replica, self.read = replica, read
        self.registry = CollectorRegistry()
        labels = ["replica", "route", "status"]
        self.requests = Counter(
            "pixelis_requests", "requests by route and status", labels, registry=self.registry
        )
        self.seconds = Histogram(
            "pixelis_request_seconds",
            "seconds from arrival to the end of the reply",
            ["replica", "route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.registry.register(self)
        self.recent: deque[tuple[float, float, bool, bool]] = deque(maxlen=RECENT)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a finished request; status 0: the caller disconnected before the reply began."""
        self.requests.labels(self.replica, route, str(status or "gone")).inc()
        self.seconds.labels(self.replica, route).observe(seconds)
        count("gateway/requests", tags={"route": route, "status": str(status or "gone")})
        observe("gateway/request_seconds", seconds, {"route": route})

    def answered(self, seconds: float, searched: bool, partial: bool) -> None:
        """``searched``: the memory was; ``partial``: a shard did not answer."""
        self.recent.append((time.monotonic(), seconds, searched, partial))

    def health(self, span_s: float = 60.0) -> dict[str, float]:
        """``p99_latency`` (nearest rank) and ``faiss_failure_rate`` of the last seconds, if known."""
        since = time.monotonic() - span_s
        recent = [answer for answer in self.recent if answer[0] >= since]
        seconds = sorted(answer[1] for answer in recent)
        searches = [answer[3] for answer in recent if answer[2]]
        metrics = {"p99_latency": seconds[math.ceil(0.99 * len(seconds)) - 1]} if seconds else {}
        return metrics | (
            {"faiss_failure_rate": sum(searches) / len(searches)} if len(searches) >= MIN_SEARCHES else {}
        )

    def collect(self) -> Iterable[Metric]:
        for name, value in self.read().items():
            metric: Metric
            if name in self.GAUGES:
                metric = GaugeMetricFamily(f"pixelis_{name}", self.GAUGES[name], labels=["replica"])
            else:
                metric = CounterMetricFamily(f"pixelis_{name}", name.replace("_", " "), labels=["replica"])
            metric.add_metric([self.replica], value)
            yield metric

    def publish(self) -> None:
        values = self.read()
        names = [name for name in ("inside", "policy_version") if name in values]
        publish({f"gateway/{name}": values[name] for name in names}, {"replica": self.replica})

    def text(self) -> bytes:
        return generate_latest(self.registry)
