"""Dashboards, alerts and actors name the same metrics."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from exported import ACTOR_METRICS

from pixelis.telemetry.metrics import metric_name

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "configs/monitoring"
DASHBOARDS = sorted((MONITORING / "grafana/dashboards").glob("*.json"))
RULES = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
EXPORTED = {
    f"ray_{metric_name(key)}{suffix}": tags
    for key, (kind, tags) in ACTOR_METRICS.items()
    for suffix in SUFFIXES[kind]
}
"""Names in Prometheus of the metrics of actors -> their labels."""


def step_metrics() -> set[str]:
    """Names in Prometheus of the metrics of docs/metrics.md that every run logs, and of evaluations."""
    rows = re.findall(
        r"^\| (`.*?) \|.*\| (.*?) \|$", (ROOT / "docs/metrics.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    cells = [cell for cell, when in rows if when.startswith(("always", "every", "with a built-in"))]
    # Updates of a service; a KL term
    logged = {*re.findall(r"`([^`]+)`", " ".join(cells)), "evolve/confidence", "policy/kl"}
    return {f"ray_{metric_name(name)}" for name in logged}


def expressions() -> list[tuple[str, str]]:
    """(place, expression) of every panel and alert."""
    found = [
        (f"{file.stem}: {panel['title']}", target["expr"])
        for file in DASHBOARDS
        for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]
        for target in panel["targets"]
    ]
    return found + [(rule["alert"], rule["expr"]) for group in RULES for rule in group["rules"]]


@pytest.mark.parametrize(("place", "expression"), expressions())
def test_every_metric_of_a_panel_or_an_alert_is_exported_with_its_labels(place: str, expression: str) -> None:
    names = re.findall(r"\bray_pixelis_\w+", expression)
    assert names or "up{" in expression
    assert set(names) <= set(EXPORTED) | step_metrics()
    labels = {"le"} | {label for name in names for label in EXPORTED.get(name, ("run",))}
    grouped = re.findall(r"\w+", " ".join(re.findall(r"by \((.*?)\)", expression)))
    assert {*re.findall(r"(\w+)=~?\"", expression), *grouped} <= labels | {"job"}


def keys(call: ast.Call) -> list[str]:
    """The literal keys of a call of count, observe or publish."""
    (first, *_) = call.args or [ast.Constant(None)]
    nodes = first.keys if isinstance(first, ast.Dict) else [first]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_actors_publish_what_is_documented() -> None:
    used: set[str] = set()
    for file in [*(ROOT / "pixelis/actors").glob("*.py"), *(ROOT / "pixelis/serve").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("count", "observe", "publish"):
                used |= set(keys(node))
    composed = {key for key in ACTOR_METRICS if key.startswith("evolution/")}
    composed |= {"gateway/inside", "gateway/policy_version"}
    assert used <= set(ACTOR_METRICS)
    assert set(ACTOR_METRICS) - used <= composed, "documented, but published nowhere"


def test_grafana_and_prometheus_find_the_files() -> None:
    provision: dict[str, Any] = yaml.safe_load(
        (MONITORING / "grafana/provisioning/dashboards/pixelis.yaml").read_text()
    )
    assert [provider["name"] for provider in provision["providers"]] == ["Pixelis", "Ray"]
    boards = [json.loads(file.read_text(encoding="utf-8")) for file in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len(boards) == 3
    for board in boards:
        variables = {variable["name"] for variable in board["templating"]["list"]}
        assert set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]))) <= variables
    prometheus = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    assert all((MONITORING / name).is_file() for name in prometheus["rule_files"])
    (job,) = prometheus["scrape_configs"]
    (files,) = job["file_sd_configs"]
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    assert [Path(name).name for name in files["files"]] == [PROMETHEUS_SERVICE_DISCOVERY_FILE]
