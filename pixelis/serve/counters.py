"""A gateway replica's own counters, as Prometheus text."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RECENT = 10_000
"""Answers whose seconds are remembered."""
MIN_SEARCHES = 10
"""Searches below which a share of failures says nothing: the first one after a start is often late."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Counters(Collector):
    """A registry of its own: requests by route and status, their seconds, and values read when somebody asks.

    ``now`` gives those values: names in ``GAUGES`` are levels, all others counters that only grow. Every line carries the
    replica's id, because a scrape through the one address of the service reaches any of them.
    """

    GAUGES: Mapping[str, str] = {
        "inside": "requests inside, working or waiting",
        "policy_version": "policy version of the last answer",
        "cache_entries": "replies kept",
        "cache_bytes": "bytes of the replies kept",
    }

    def __init__(self, replica: str, now: Callable[[], Mapping[str, float]]):
        self.replica, self.now = replica, now
        self.registry = CollectorRegistry()
        names = ["replica", "route", "status"]
        self.requests = Counter("pixelis_requests", "requests by route and status", names, registry=self.registry)
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
        """Count a finished request; status 0 is a caller who left before the reply began."""
        self.requests.labels(self.replica, route, str(status or "gone")).inc()
        self.seconds.labels(self.replica, route).observe(seconds)

    def answered(self, seconds: float, searched: bool, partial: bool) -> None:
        """Note how long an answer took, whether memory was searched for it, and whether some shard did not answer."""
        self.recent.append((time.monotonic(), seconds, searched, partial))

    def health(self, span_s: float = 60.0) -> dict[str, float]:
        """Of the last ``span_s`` seconds: ``p99_latency`` (nearest rank) and ``faiss_failure_rate`` (share of partial searches).

        Empty without answers, and there is no rate of fewer than ``MIN_SEARCHES``: nothing is known to be well, or ill.
        """
        since = time.monotonic() - span_s
        recent = [answer for answer in self.recent if answer[0] >= since]
        seconds = sorted(answer[1] for answer in recent)
        searches = [answer[3] for answer in recent if answer[2]]
        found = {"p99_latency": seconds[math.ceil(0.99 * len(seconds)) - 1]} if seconds else {}
        return found | ({"faiss_failure_rate": sum(searches) / len(searches)} if len(searches) >= MIN_SEARCHES else {})

    def collect(self) -> Iterable[Metric]:
        """The values of ``now``."""
        for name, value in self.now().items():
            metric: Metric
            if name in self.GAUGES:
                metric = GaugeMetricFamily(f"pixelis_{name}", self.GAUGES[name], labels=["replica"])
            else:
                metric = CounterMetricFamily(f"pixelis_{name}", f"{name.replace('_', ' ')} so far", labels=["replica"])
            metric.add_metric([self.replica], value)
            yield metric

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
