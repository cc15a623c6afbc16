"""Streams over real HTTP: chunks for the official client, server-sent events of /v1/agent."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from gateway_helpers import error_of, messages, until
from scripted import Deployed, picture_url

pytestmark = pytest.mark.slow


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and data of server-sent events, without comments."""
    name, data = "", ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif not line and data:
            yield name, json.loads(data)
            name, data = "", ""


def test_thoughts_are_streamed_letter_by_letter(client: openai.OpenAI) -> None:
    asked, shown = messages("say 7", picture_url()), {"type": "input_image", "image_url": picture_url()}
    stream: Any = client.chat.completions.create(model="pixelis-nano", messages=asked, stream=True)
    deltas = [c.choices[0].delta.model_extra or {} for c in stream if c.choices]
    assert [delta["reasoning"] for delta in deltas if delta.get("reasoning")] == list("zoom")
    with client.responses.stream(model="pixelis-nano", input="say 7") as events:
        # Without a picture it only answers
        assert [e.delta for e in events if e.type == "response.reasoning_text.delta"] == []
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "say 7"}, shown]}]
    with client.responses.stream(model="pixelis-nano", input=parts) as events:
        kinds = [(e.type, getattr(e, "delta", None)) for e in events if "reasoning" in e.type]
    letters = [("response.reasoning_text.delta", letter) for letter in "zoom"]
    assert kinds == [*letters, ("response.reasoning_text.done", None)]


def test_turns_are_sent_without_delay(deployed: Deployed) -> None:
    body = {"question": "pause 0.5 say 7", "image": picture_url(), "stream": True, "samples": 1}
    with deployed.client() as client, client.stream("POST", "/v1/agent", json=body) as response:
        times = [time.monotonic() for _ in response.iter_raw()]
    # Three turns with pauses between; the first ones may have been read late
    assert times[-1] - times[0] > 0.9
    assert len([t for t in times if times[-1] - t > 0.2]) >= 3


def test_the_official_client_sees_turns_and_the_answer(client: openai.OpenAI) -> None:
    asked = messages("say Käse", picture_url(format="JPEG"))
    usage: Any = {"include_usage": True}
    chunks: Any = list(
        client.chat.completions.create(
            model="pixelis-nano", messages=asked, stream=True, stream_options=usage
        )
    )
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    extras = [(c.model_extra or {}).get("pixelis", {}) for c in chunks]
    turns = [extra["event"]["turn"] for extra in extras if "event" in extra]
    assert (len(turns), {turn["role"] for turn in turns}) == (12, {"assistant", "tool"})
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Käse"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert extras[-2]["confidence"] == 1.0
    assert len({c.id for c in chunks}) == 1


@pytest.mark.parametrize(
    ("question", "code"), [("refuse0 refuse1", "unavailable"), ("break", "internal_error")]
)
def test_a_failure_is_the_last_event(
    deployed: Deployed, client: openai.OpenAI, question: str, code: str
) -> None:
    body = {"question": question, "image": picture_url(), "stream": True}
    with deployed.client() as http, http.stream("POST", "/v1/agent", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        (name, data), *more = events(response.iter_lines())
    assert (name, data["error"]["code"], more) == ("error", code, [])
    assert "secret" not in json.dumps(data)
    asked = messages(question, picture_url())
    with pytest.raises(openai.APIError) as caught:
        list(client.chat.completions.create(model="pixelis-nano", messages=asked, stream=True))
    assert caught.value.code == code


def test_an_invalid_request_gets_a_status_instead_of_a_stream(
    deployed: Deployed, client: openai.OpenAI
) -> None:
    for image, code in (("file:///etc/passwd", "image_scheme"), (picture_url()[:100], "image_undecodable")):
        response = deployed.ask("q", image=image, stream=True)
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="pixelis-nano", messages=messages("q", image), stream=True)


def test_disconnecting_from_a_stream_cancels_the_work(deployed: Deployed) -> None:
    before = deployed.counters()
    body = {"question": "pause 0.3 say 7", "image": picture_url(), "stream": True, "learn": False}
    with deployed.client() as client:
        with client.stream("POST", "/v1/agent", json=body) as response:
            next(events(response.iter_lines()))  # one turn is enough
        assert until(lambda: deployed.counters()["closed"] > before["closed"])
        assert deployed.counters()["streamed"] == before["streamed"]
        # Its place in the queue is free
        inside = re.compile(r"^pixelis_inside{.*} 0.0$", re.MULTILINE)
        assert until(lambda: inside.search(client.get("/metrics").text) is not None)


def test_open_streams_count_against_admission(deployed: Deployed) -> None:
    body = {"question": "pause 0.4 say 7", "image": picture_url(), "stream": True, "learn": False}
    with deployed.client() as client, ExitStack() as stack:
        responses = [stack.enter_context(client.stream("POST", "/v1/agent", json=body)) for _ in range(6)]
        assert [r.status_code for r in responses] == [200] * 6
        shed = client.post("/v1/agent", json=body)
        assert (shed.status_code, error_of(shed)["code"]) == (429, "overloaded")
        assert int(shed.headers["Retry-After"]) >= 1
        assert [list(events(r.iter_lines()))[-1][0] for r in responses[:4]] == ["answer"] * 4
