"""Metrics that the nodes of the running cluster export, as Prometheus reads them."""

from __future__ import annotations

import time
from collections.abc import Iterable

import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families

from pixelis.telemetry.metrics import ACTOR_METRICS, metric_name


def missing(keys: Iterable[str], timeout_s: float = 30.0) -> set[str]:
    """The keys of ACTOR_METRICS that no node exports with their kind and labels within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        exported = {}
        for node in ray.nodes():
            if node["Alive"]:
                address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
                text = httpx.get(address, trust_env=False).text
                for family in text_string_to_metric_families(text):
                    labels = {label for sample in family.samples for label in sample.labels}
                    exported[family.name] = (family.type, labels)
        absent = set()
        for key in keys:
            kind, tags, _ = ACTOR_METRICS[key]
            found, labels = exported.get(f"ray_{metric_name(key)}", ("", set()))
            if found != kind or not labels >= set(tags):
                absent.add(key)
        if not absent or time.monotonic() > deadline:
            return absent
        time.sleep(1.0)
