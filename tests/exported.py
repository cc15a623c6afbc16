"""Metrics that the nodes of the running cluster export, as Prometheus reads them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families

from pixelis.telemetry.metrics import metric_name

PAGE = Path(__file__).parents[1] / "docs/monitoring.md"
ACTOR_METRICS = {
    name: (re.match(r"[a-z]+?(?=s?\b)", labels)[0], re.findall(r"`(\w+)`", labels))  # type: ignore[index]
    for names, labels in re.findall(
        r"^\| (`\w+/.*?) \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    for name in re.findall(r"`(\w+/\w+)`", names)
}
"""The documented metrics of actors: kind and labels."""


def exported() -> dict[str, tuple[str, set[str]]]:
    """Name -> kind and labels of the metrics that the nodes export now."""
    found = {}
    for node in ray.nodes():
        if node["Alive"]:
            address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            for family in text_string_to_metric_families(httpx.get(address, trust_env=False).text):
                labels = {label for sample in family.samples for label in sample.labels}
                found[family.name] = (family.type, labels)
    return found


def missing(keys: Iterable[str], timeout_s: float = 30.0) -> set[str]:
    """The keys that no node exports in time: those of ACTOR_METRICS as documented, others as a gauge of a run."""
    deadline = time.monotonic() + timeout_s
    while True:
        found, absent = exported(), set()
        for key in keys:
            kind, tags = ACTOR_METRICS.get(key, ("gauge", ["run"]))
            actual, labels = found.get(f"ray_{metric_name(key)}", ("", set[str]()))
            if actual != kind or not labels >= set(tags):
                absent.add(key)
        if not absent or time.monotonic() > deadline:
            return absent
        time.sleep(1.0)
