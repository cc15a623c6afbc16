"""The API's description and its page, and errors of parameters that FastAPI validates."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pixelis.config import load
from pixelis.serve.agent import Agent
from pixelis.serve.gateway import create_app
from pixelis.serve.keys import digest
from pixelis.serve.state import GatewayState

BODIES = {
    "/v1/chat/completions": ("ChatRequest", "ChatCompletion"),
    "/v1/responses": ("ResponsesRequest", "ResponseObject"),
    "/v1/agent": ("AgentRequest", "AgentReply"),
    "/v1/feedback": ("FeedbackRequest", "FeedbackReply"),
    "/v1/experiences/search": ("ExperienceSearch", "FoundExperiences"),
    "/v1/evolution/pause": ("EmptyRequest", "EvolutionReply"),
    "/v1/evolution/resume": ("EmptyRequest", "EvolutionReply"),
    "/v1/evolution/promote": ("PromoteRequest", "EvolutionReply"),
    "/v1/evolution/rollback": ("RollbackRequest", "EvolutionReply"),
    "/v1/review/{id}": ("ReviewDecision", "DecisionReply"),
}
REPLIES = {
    "/v1/responses/{id}": "ResponseObject",
    "/v1/files": "FileList",
    "/v1/files/{id}": "FileObject",
    "/v1/experiences": "ExperienceList",
    "/v1/experiences/{id}": "ExperienceReply",
    "/v1/evolution": "EvolutionStatus",
    "/v1/review": "ReviewList",
    "/v1/review/{id}": "ReviewReply",
    "/v1/models": "ModelList",
    "/v1/models/{name}": "ModelCard",
    "/healthz": "Health",
}
KEY = "a key"


def client(*overrides: str, key: str | None = None) -> TestClient:
    backends = SimpleNamespace(evolution=None)
    agent = SimpleNamespace(backends=backends, memory=None, version=None, counts=Counter())
    state = GatewayState(load(None, list(overrides)), cast(Agent, agent), digest(key) if key else None)
    return TestClient(
        create_app(state),
        base_url="http://localhost",
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )


def schema_of(content: dict[str, Any]) -> str:
    return content["application/json"]["schema"]["$ref"].rpartition("/")[2]


def test_the_description_has_every_route_with_its_bodies() -> None:
    gateway = client()
    description = gateway.get("/openapi.json").json()
    paths, schemas = description["paths"], description["components"]["schemas"]
    assert set(paths) == {*BODIES, *REPLIES, "/metrics", "/v1/files/{id}/content"}
    assert "multipart/form-data" in paths["/v1/files"]["post"]["requestBody"]["content"]
    for path, (request, reply) in BODIES.items():
        operation = paths[path]["post"]
        assert schema_of(operation["requestBody"]["content"]) == request
        assert schema_of(operation["responses"]["200"]["content"]) == reply
        assert schemas[request]["type"] == schemas[reply]["type"] == "object"
    for path, reply in REPLIES.items():
        assert schema_of(paths[path]["get"]["responses"]["200"]["content"]) == reply
    assert schemas["ChatRequest"]["properties"]["messages"]["items"]["$ref"] == "#/components/schemas/Message"
    for name in re.findall(r'"#/components/schemas/(\w+)"', gateway.get("/openapi.json").text):
        assert name in schemas
    for path, methods in paths.items():
        for operation in methods.values():
            assert schema_of(operation["responses"]["default"]["content"]) == "ErrorResponse"
            assert "422" not in operation["responses"]
            assert ("security" in operation) is (path != "/healthz")
            assert operation["description"]


def test_a_service_without_page_has_no_description_either() -> None:
    gateway = client("serve.page=false")
    assert [gateway.get(path).status_code for path in ("/", "/docs", "/openapi.json", "/v1/models")] == [
        404,
        404,
        404,
        200,
    ]


@pytest.mark.parametrize(
    ("path", "status", "code", "param"),
    [
        ("/v1/experiences?limit=0", 400, "invalid_value", "limit"),
        ("/v1/experiences?limit=many", 400, "invalid_value", "limit"),
        ("/v1/experiences?user=%00", 400, "invalid_characters", "user"),
        ("/v1/review?state=maybe", 400, "invalid_value", "state"),
        ("/v1/review/a%20b", 404, "not_found", "id"),
        ("/v1/experiences/" + "x" * 500, 404, "not_found", "id"),
    ],
)
def test_validation_errors_have_openais_format(path: str, status: int, code: str, param: str) -> None:
    reply = client().get(path)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert (error["code"], error["param"]) == (code, param)


def test_a_request_is_refused_before_its_body_is_read() -> None:
    """Each check comes before the next: read-only mode or key, content type, room, rate, size, content."""
    text = {"content": b"{", "headers": {"Content-Type": "text/plain"}}
    json = {"content": b"{", "headers": {"Content-Type": "application/json"}}
    keyed = client("serve.host=0.0.0.0", key=KEY)
    assert keyed.post("/v1/agent", **text).json()["error"]["code"] == "content_type"  # type: ignore[arg-type]
    keyed.headers.clear()
    assert keyed.post("/v1/agent", **text).json()["error"]["code"] == "invalid_api_key"  # type: ignore[arg-type]
    limited = client("serve.per_minute=1", "serve.max_body_bytes=2000")
    codes = [limited.post("/v1/agent", **json).json()["error"]["code"] for _ in range(2)]  # type: ignore[arg-type]
    assert codes == ["invalid_json", "rate_limit_exceeded"]
    cast(FastAPI, limited.app).state.gateway.admission.inside = 10**6
    assert limited.post("/v1/agent", **json).json()["error"]["code"] == "overloaded"  # type: ignore[arg-type]
    large = client("serve.max_body_bytes=2000").post("/v1/agent", json={"question": "q" * 2001})
    assert large.json()["error"]["code"] == "body_too_large"
    assert client("serve.read_only=true").post("/v1/feedback", **json).json()["error"]["code"] == "read_only"  # type: ignore[arg-type]
