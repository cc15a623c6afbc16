"""Alerts."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pixelis.config import AlertsConfig, ThresholdConfig
from pixelis.errors import BadConfig
from pixelis.evolution.alerts import WEBHOOK_VARIABLE, Alerter

URL = WEBHOOK_VARIABLE


@pytest.fixture
def receiver() -> Iterator[tuple[HTTPServer, list[dict]]]:
    """A webhook's other end: the bodies posted; answers with `server.status`."""
    bodies: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(self.server.status)  # type: ignore[attr-defined]
            self.send_header("location", "/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.status = 200  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server, bodies
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("metric", "good", "bad", "severity", "cooldown"),
    [
        ("update_rate", 0.01, 0.0, "warning", 600),
        ("faiss_failure_rate", 0.1, 0.11, "critical", 300),
        ("mean_kl", 0.2, 0.21, "warning", 300),
        ("queue_size", 900, 901, "warning", 180),
        ("queue_fill", 0.9, 0.95, "warning", 180),
        ("memory_usage", 0.9, 0.91, "critical", 300),
        ("p99_latency", 2.0, 2.5, "warning", 600),
    ],
)
def test_built_in_thresholds_and_their_cooldowns(metric, good, bad, severity, cooldown):
    alerter = Alerter(AlertsConfig(), environment={})
    assert alerter.check({metric: good}, now=0) == []
    (alert,) = alerter.check({metric: bad}, now=1)
    assert (alert.metric, alert.value, alert.severity, alert.component) == (metric, bad, severity, "service")
    assert alerter.check({metric: bad}, now=cooldown) == []
    assert len(alerter.check({metric: bad}, now=1 + cooldown)) == 1


def test_a_cooldown_applies_to_one_component_metric_and_severity():
    critical = ThresholdConfig(metric="mean_kl", over=0.5, severity="critical")
    alerter = Alerter(AlertsConfig(extra=[critical]), environment={})
    for component, metrics, severities in (
        ("learner", {"mean_kl": 0.3}, ["warning"]),
        ("canary", {"mean_kl": 0.3}, ["warning"]),
        ("learner", {"mean_kl": 0.3, "queue_size": 1000}, ["warning"]),
        ("learner", {"mean_kl": 0.6}, ["critical"]),
        ("learner", {"mean_kl": 0.3, "queue_size": 1000}, []),
    ):
        alerts = alerter.check(metrics, now=0, component=component)
        assert [alert.severity for alert in alerts] == severities


@pytest.mark.parametrize("status", [200, 500, 307])
def test_the_webhook_gets_the_alert_and_its_failure_and_secret_stay_inside(receiver, caplog, status):
    server, bodies = receiver
    server.status = status
    alerter = Alerter(
        AlertsConfig(), environment={URL: f"http://127.0.0.1:{server.server_port}/hook?key=s3cret"}
    )
    with caplog.at_level(logging.DEBUG):
        assert len(alerter.check({"memory_usage": 0.95}, now=7.0)) == 1
        alerter.posts.shutdown()
    (body,) = bodies  # a redirect is not followed
    assert body["text"] == "pixelis critical: service memory_usage is 0.95, above 0.9"
    assert (body["metric"], body["value"], body["time"]) == ("memory_usage", 0.95, 7.0)
    assert ("webhook failed" in caplog.text) == (status != 200)
    assert "s3cret" not in caplog.text


def test_alerts_reach_log_file_and_ring(tmp_path, caplog):
    alerter = Alerter(AlertsConfig(), tmp_path / "run", environment={})
    with caplog.at_level(logging.INFO, logger="pixelis"):
        alerter.check({"memory_usage": 0.95}, now=7.0)
        alerter.check({"mean_kl": 0.5}, now=8.0)
    assert [record.levelname for record in caplog.records] == ["CRITICAL", "WARNING"]
    written = [json.loads(line) for line in (tmp_path / "run" / "alerts.jsonl").read_text().splitlines()]
    expected = [(7.0, "memory_usage", 0.9, "over"), (8.0, "mean_kl", 0.2, "over")]
    assert [(w["time"], w["metric"], w["limit"], w["side"]) for w in written] == expected
    assert [alert.metric for alert in alerter.recent(5)] == ["mean_kl", "memory_usage"]
    assert alerter.recent(0) == []


def test_a_restarted_process_repeats_no_alert_within_its_cooldown(tmp_path):
    Alerter(AlertsConfig(), tmp_path, environment={}).check({"mean_kl": 0.5, "queue_size": 901}, now=8.0)
    with (tmp_path / "alerts.jsonl").open("a") as file:
        # Of another version, and cut off by a kill
        file.write('{"time": 9, "metric": 7}\n[]\n{"time": 9.0, "compo\n')
    alerter = Alerter(AlertsConfig(), tmp_path, environment={})
    assert [alert.metric for alert in alerter.recent()] == ["queue_size", "mean_kl"]
    assert alerter.check({"mean_kl": 0.6}, now=300.0) == []
    assert [alert.metric for alert in alerter.check({"mean_kl": 0.6, "memory_usage": 0.95}, now=309.0)] == [
        "mean_kl",
        "memory_usage",
    ]


def test_a_file_that_cannot_be_written_prevents_no_alert(tmp_path):
    (tmp_path / "run").write_text("no folder")
    alerter = Alerter(AlertsConfig(), tmp_path / "run", environment={})
    assert len(alerter.check({"mean_kl": 0.5}, now=0)) == 1


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/x", "host/path", "http://"])
def test_a_webhook_must_be_http(url):
    with pytest.raises(BadConfig, match=URL):
        Alerter(AlertsConfig(), environment={URL: url})
