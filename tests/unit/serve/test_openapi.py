"""The API's description and its page, and errors of parameters that FastAPI validates."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gateways import client, state_of

PATHS = {"/healthz", "/metrics", "/v1/agent", "/v1/chat/completions", "/v1/models", "/v1/models/{name}"}
PATHS |= {"/v1/responses", "/v1/responses/{id}", "/v1/files", "/v1/files/{id}", "/v1/files/{id}/content"}
PATHS |= {"/v1/experiences", "/v1/experiences/{id}", "/v1/experiences/search", "/v1/feedback"}
PATHS |= {"/v1/evolution", "/v1/review", "/v1/review/{id}"}
PATHS |= {"/v1/episodes", "/v1/episodes/next", "/v1/episodes/{id}"}
PATHS |= {f"/v1/episodes/{{id}}/{name}" for name in ("v1/chat/completions", "v1/responses", "reward", "fail")}
PATHS |= {f"/v1/evolution/{order}" for order in ("pause", "resume", "promote", "rollback")}


def test_the_description_has_every_route_with_its_bodies() -> None:
    gateway = client()
    description = gateway.get("/openapi.json").json()
    paths, schemas = description["paths"], description["components"]["schemas"]
    assert set(paths) == PATHS

    def schema_of(part: dict[str, Any]) -> str:
        return part["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]

    assert "multipart/form-data" in paths["/v1/files"]["post"]["requestBody"]["content"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            if path not in ("/metrics", "/v1/files/{id}/content"):
                assert schemas[schema_of(operation["responses"]["200"])]["type"] == "object", path
            if method == "post" and path != "/v1/files":
                assert schemas[schema_of(operation["requestBody"])]["type"] == "object", path
            assert schema_of(operation["responses"]["default"]) == "ErrorResponse"
            assert "422" not in operation["responses"]
            assert ("security" in operation) is (path != "/healthz")
            assert operation["description"]
    assert schema_of(paths["/v1/chat/completions"]["post"]["requestBody"]) == "ChatBody"
    assert (
        schemas["ChatBody"]["properties"]["messages"]["items"]["$ref"] == "#/components/schemas/ChatMessage"
    )
    for name in re.findall(r'"#/components/schemas/(\w+)"', gateway.get("/openapi.json").text):
        assert name in schemas


def test_a_service_without_page_has_no_description_either() -> None:
    gateway = client("serve.page=false")
    for path, status in (("/", 404), ("/docs", 404), ("/openapi.json", 404), ("/v1/models", 200)):
        assert gateway.get(path).status_code == status


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


def test_what_is_no_route_is_refused() -> None:
    gateway = client()
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/redoc", 404),
        ("GET", "/v1/agent", 405),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/evolution/erase", 404),
    ):
        reply = gateway.request(method, path)
        assert (reply.status_code, set(reply.json())) == (status, {"error"})


def test_a_request_is_refused_before_its_body_is_read() -> None:
    """Each check comes before the next: read-only mode or key, content type, room, rate, size, content."""

    def code(gateway: Any, path: str = "/v1/agent", type: str = "application/json", **body: Any) -> str:
        body = body or {"content": b"{"}
        return gateway.post(path, **body, headers={"Content-Type": type}).json()["error"]["code"]

    keyed = client("serve.host=0.0.0.0", required="a key")
    assert code(keyed, type="text/plain") == "content_type"
    keyed.headers.clear()
    assert code(keyed, type="text/plain") == "invalid_api_key"
    limited = client("serve.per_minute=1", "serve.max_body_bytes=2000")
    assert code(limited, type="application/json; charset=utf-8") == "invalid_json"
    assert code(limited) == "rate_limit_exceeded"
    state_of(limited).admission.inside = 10**6
    assert code(limited) == "overloaded"
    assert code(client("serve.max_body_bytes=2000"), json={"question": "q" * 2001}) == "body_too_large"
    assert code(client("serve.read_only=true"), "/v1/feedback") == "read_only"
