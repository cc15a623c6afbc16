"""Invalid and generated requests: each gets a 4xx with a message, and none reaches a generator."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from gateway_helpers import error_of, messages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from scripted import Deployed, picture_url

pytestmark = pytest.mark.slow


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


EXIF = Image.Exif()
EXIF[0x0112] = 6  # a quarter turn
FRAMES = [Image.new("P", (40, 30), colour) for colour in (1, 2, 3)]


REFUSED: dict[str, tuple[str, str]] = {
    "http": ("http://169.254.169.254/latest/meta-data", "image_scheme"),
    "svg that says png": (url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "image_format"),
    "html that says png": (url(b"<html></html>"), "image_format"),
    "pdf that says png": (url(b"%PDF-1.7\n"), "image_format"),
    "not base64": ("data:image/png;base64,@@@@", "image_undecodable"),
    "empty": ("data:image/png;base64,", "image_empty"),
    "noise": (url(bytes(range(256)) * 4), "image_undecodable"),
    "too many pixels": (picture_url((1100, 1000), "GIF"), "image_too_many_pixels"),
}
"""The decoder's own tests have damaged pictures, bombs, and every mode and format."""
ACCEPTED: dict[str, tuple[str, tuple[int, int]]] = {
    "16 bits": (url(saved(Image.fromarray(np.full((30, 40), 40_000, np.uint16)), "PNG")), (40, 30)),
    "turned by exif": (url(saved(Image.new("RGB", (40, 30)), "JPEG", exif=EXIF), "jpeg"), (30, 40)),
    "animated gif": (url(saved(FRAMES[0], "GIF", save_all=True, append_images=FRAMES), "gif"), (40, 30)),
    "wrong mime": (url(saved(Image.new("RGB", (40, 30)), "WEBP"), "png"), (40, 30)),
}


def agent(image: str) -> dict[str, Any]:
    return {"question": "say 7", "image": image, "learn": False, "remember": False}


def chat(image: str) -> dict[str, Any]:
    return {"model": "pixelis-nano", "messages": messages("say 7", image)}


def responses(image: str) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": "say 7"}, {"type": "input_image", "image_url": image}]
    return {"model": "pixelis-nano", "input": [{"role": "user", "content": parts}]}


ROUTES = {"/v1/agent": agent, "/v1/chat/completions": chat, "/v1/responses": responses}
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_pictures_are_refused(deployed: Deployed, name: str) -> None:
    image, code = REFUSED[name]
    before = deployed.counters()["rollouts"]
    with deployed.client() as client:
        for path, body in ROUTES.items():
            reply = client.post(path, json=body(image))
            assert (reply.status_code, error_of(reply)["code"]) == (400, code), reply.text
            assert len(error_of(reply)["message"]) < 400
    assert deployed.counters()["rollouts"] == before


@pytest.mark.parametrize("name", ACCEPTED)
def test_unusual_pictures_are_accepted(deployed: Deployed, name: str) -> None:
    image, size = ACCEPTED[name]
    response = deployed.ask("say 7", image=image, learn=False, remember=False)
    assert response.status_code == 200, response.text
    assert tuple(response.json()["trajectory"]["images"][0]["source_size"]) == size


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
NAMES = [
    "question", "image", "messages", "model", "samples", "temperature", "seed", "stream", "user", "n",
    "top_k", "tools", "max_turns",
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, Any]:
    """A route and a valid body of which some fields, or something inside them, are replaced."""
    path = draw(st.sampled_from(sorted(ROUTES)))
    body = ROUTES[path](picture_url((8, 8)))
    if "messages" in body and draw(st.booleans()):
        (message,) = body["messages"]
        place = draw(st.sampled_from([message, *message["content"]]))
        place[draw(st.sampled_from(["role", "content", "type", "text", "image_url", "name"]))] = draw(VALUES)
    for name in draw(st.lists(st.sampled_from(NAMES) | st.text(max_size=8), max_size=3)):
        body[name] = draw(VALUES)
    return path, body


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40)
@given(mutated())
def test_no_body_is_a_failure_of_the_service(deployed: Deployed, sent: tuple[str, Any]) -> None:
    with deployed.client() as client:
        reply = client.post(sent[0], content=json.dumps(sent[1]).encode(), headers=JSON)
    assert reply.status_code < 500 or reply.status_code == 504, reply.text
    if reply.status_code >= 400:
        assert error_of(reply)["code"]


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40)
@given(
    st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD"]),
    st.lists(
        st.sampled_from(["v1", "agent", "experiences", "review", "models", "evolution", "pages", ".."])
        | st.text(max_size=6),
        max_size=4,
    ),
    st.dictionaries(
        st.sampled_from(["limit", "user", "before", "state"]) | st.text(max_size=4),
        st.text(max_size=8),
        max_size=2,
    ),
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
            method,
            f"{deployed.url}{path}?{pairs}",
            content=body,
            headers={"Content-Type": "application/json"},
        )
    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400 and method != "HEAD":
        assert error_of(reply)["code"]
