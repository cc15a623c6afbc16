"""A corpus of 700 bad requests and generated ones: each is refused by name in OpenAI's format, and the memory returns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from bad_inputs import ROUTES, BadRequest, corpus
from gateway_helpers import error_of, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_gateway import private_bytes
from scripted import Deployed, picture_url

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def http(deployed: Deployed) -> Iterator[httpx.Client]:
    with deployed.client(key=None, timeout=60) as client:
        yield client


def problem(http: httpx.Client, request: BadRequest) -> tuple[str | None, float]:
    """What is wrong with the reply to a bad request, if anything, and its seconds."""
    started = time.monotonic()
    try:
        reply = http.request(**request.send())
        seconds = time.monotonic() - started
        if not 400 <= reply.status_code < 500:
            return f"{request.name}: {reply.status_code} {reply.text[:200]}", seconds
        if request.method != "HEAD":  # has no body
            error = error_of(reply)
            assert error["code"], "no code"
            assert 0 < len(error["message"]) < 500, "message of another length"
    except (httpx.HTTPError, ValueError, AssertionError) as error:
        return f"{request.name}: {type(error).__name__} {str(error)[:200]}", time.monotonic() - started
    return None, seconds


def test_every_bad_request_is_refused_by_name_and_leaves_no_memory(
    deployed: Deployed, http: httpx.Client, record_figures: Callable[..., None]
) -> None:
    requests = corpus()
    assert len(requests) >= 500
    gateway = next(
        p for p in psutil.process_iter(["cmdline"]) if "ray::ServeReplica:pixelis:Gateway" in " ".join(p.info["cmdline"] or [])
    )
    send = lambda request: problem(http, request)  # noqa: E731
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, requests[::4]))  # warm
        before, rollouts = private_bytes(gateway), deployed.counters()["rollouts"]
        results = list(pool.map(send, requests))
    problems = [text for text, _ in results if text is not None]
    assert not problems, "\n".join(problems)
    assert deployed.counters()["rollouts"] == rollouts
    assert until(lambda: private_bytes(gateway) < 1.1 * before, 20)
    seconds = [s for _, s in results]
    record_figures(
        requests=len(requests), p50_s=float(np.median(seconds)), most_s=max(seconds), memory=private_bytes(gateway) / before
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
NAMES = [
    "question",
    "image",
    "messages",
    "model",
    "samples",
    "temperature",
    "seed",
    "stream",
    "user",
    "n",
    "top_k",
    "tools",
    "max_turns",
]


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, Any]:
    """A route and a valid body of which some fields, or something inside them, are replaced."""
    path = draw(st.sampled_from(sorted(ROUTES)))
    body = ROUTES[path](image=picture_url((8, 8))) | ({"remember": False} if path == "/v1/agent" else {})
    if "messages" in body and draw(st.booleans()):
        (message,) = body["messages"]
        place = draw(st.sampled_from([message, *message["content"]]))
        place[draw(st.sampled_from(["role", "content", "type", "text", "image_url", "name"]))] = draw(JSON)
    for name in draw(st.lists(st.sampled_from(NAMES) | st.text(max_size=8), max_size=3)):
        body[name] = draw(JSON)
    return path, body


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=150)
@given(mutated())
def test_no_body_is_a_failure_of_the_service(deployed: Deployed, sent: tuple[str, Any]) -> None:
    with deployed.client() as client:
        reply = client.post(sent[0], content=json.dumps(sent[1]).encode(), headers={"Content-Type": "application/json"})
    assert reply.status_code < 500 or reply.status_code == 504, reply.text
    if reply.status_code >= 400:
        assert error_of(reply)["code"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=150)
@given(
    st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD"]),
    st.lists(
        st.sampled_from(["v1", "agent", "experiences", "review", "models", "evolution", "pages", ".."]) | st.text(max_size=6),
        max_size=4,
    ),
    st.dictionaries(st.sampled_from(["limit", "user", "before", "state"]) | st.text(max_size=4), st.text(max_size=8), max_size=2),
    st.binary(max_size=40),
)
def test_no_path_or_query_is_a_failure_of_the_service(
    deployed: Deployed, method: str, parts: list[str], query: dict[str, str], body: bytes
) -> None:
    encode = lambda text: "".join(f"%{byte:02x}" for byte in text.encode("utf-8", "surrogatepass"))  # noqa: E731
    path = "/" + "/".join(part if part.isascii() and part.isalnum() else encode(part) for part in parts)
    pairs = "&".join(f"{encode(name)}={encode(value)}" for name, value in query.items())
    if method == "DELETE" and parts[:2] == ["v1", "experiences"]:
        return  # would delete
    with deployed.client() as client:
        reply = client.request(
            method, f"{deployed.url}{path}?{pairs}", content=body, headers={"Content-Type": "application/json"}
        )
    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400 and method != "HEAD":
        assert error_of(reply)["code"]
