"""One trace from a request to the update task that it gave; test_evolution has the rest of the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gateway_helpers import until
from scripted import Deployed, picture_url

from pixelis.telemetry import tracing

pytestmark = pytest.mark.slow

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def spans_of(deployed: Deployed, trace_id: str) -> dict[str, dict[str, Any]]:
    traces = tracing.read(Path(deployed.config.run.dir) / "traces")
    return {span["name"]: span for span in traces.get(trace_id, [])}


def test_a_request_its_vote_its_memory_and_its_update_task_are_one_trace(deployed: Deployed) -> None:
    body = {"question": "say 7,7,7,8", "image": picture_url()}
    with deployed.client() as client:
        own = client.post("/v1/agent", json=body)
        joined = client.post(
            "/v1/agent", json=body | {"question": "say 6,6,6,8"}, headers={"traceparent": CALLER}
        )
        missing = client.get("/v1/experiences/none", headers={"traceparent": CALLER})
        assert "X-Trace-Id" not in client.get("/healthz").headers
    assert joined.headers["X-Trace-Id"] == missing.headers["X-Trace-Id"] == CALLER.split("-")[1]
    assert "X-Trace-Id" in own.headers, own.headers
    id = own.headers["X-Trace-Id"]
    assert id != CALLER.split("-")[1]
    expected = {"POST /v1/agent", "decode", "rollout", "vote", "remember", "store", "submit"}
    assert until(lambda: expected <= set(spans_of(deployed, id))), set(spans_of(deployed, id))
    spans = spans_of(deployed, id)
    root = spans["POST /v1/agent"]
    assert root["parent"] == ""
    assert root["attributes"]["http.response.status_code"] == "200"
    assert spans["rollout"]["parent"] == root["id"]
    assert spans["submit"]["service"] == "evolution"
    assert spans["store"]["start"] >= spans["vote"]["start"]
    assert until(lambda: "POST /v1/agent" in spans_of(deployed, CALLER.split("-")[1]))


def test_the_log_has_a_line_for_each_request_with_its_trace_and_none_of_its_contents(
    deployed: Deployed,
) -> None:
    with deployed.client() as client:
        answered = client.post("/v1/agent?secret=1", json={"question": "say 5,5", "image": picture_url()})
        client.get("/v1/experiences/none", headers={"traceparent": CALLER})
        client.get("/healthz")

    def lines() -> dict[str, dict[str, Any]]:
        files = (Path(deployed.config.run.dir) / "logs").glob("gateway-*.jsonl")
        every = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        return {
            line["trace_id"] + line.get("route", ""): line
            for line in every
            if line["logger"] == "pixelis.requests"
        }

    id = answered.headers["X-Trace-Id"]
    assert until(lambda: f"{id}/v1/agent" in lines())
    line = lines()[f"{id}/v1/agent"]
    assert {key: line[key] for key in ("method", "route", "status", "level", "service", "caller")} == {
        "method": "POST",
        "route": "/v1/agent",
        "status": 200,
        "level": "info",
        "service": "gateway",
        "caller": "key PIXELIS_API_KEY",
    }
    assert line["ms"] > 0
    assert until(
        lambda: lines().get(f"{CALLER.split('-')[1]}/v1/experiences/{{id}}", {}).get("status") == 404
    ), lines()
    text = json.dumps(lines())
    assert not any(part in text for part in ("secret", "say 5", "healthz"))
