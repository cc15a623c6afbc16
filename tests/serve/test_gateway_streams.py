"""Streams over real HTTP: chunks for the official client, server-sent events of /v1/agent."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from gateway_helpers import messages, until
from scripted import KEY, Deployed, picture_url

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(deployed: Deployed) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


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


def streamed(deployed: Deployed, question: str, **changes: Any) -> list[tuple[str, dict[str, Any]]]:
    body = {"question": question, "image": picture_url(), "stream": True, "learn": False, **changes}
    with deployed.client() as client, client.stream("POST", "/v1/agent", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response.iter_lines()))


def test_thoughts_are_streamed_letter_by_letter(client: openai.OpenAI) -> None:
    stream: Any = client.chat.completions.create(
        model="pixelis-nano", messages=messages("say 7", picture_url()), stream=True
    )
    pieces = [
        c.choices[0].delta.model_extra.get("reasoning")
        for c in stream
        if c.choices and c.choices[0].delta.model_extra
    ]
    assert [piece for piece in pieces if piece] == list("zoom")
    with client.responses.stream(model="pixelis-nano", input="say 7") as events:
        # Without a picture it only answers
        assert [e.delta for e in events if e.type == "response.reasoning_text.delta"] == []
    parts: Any = [
        {"type": "input_text", "text": "say 7"},
        {"type": "input_image", "image_url": picture_url()},
    ]
    with client.responses.stream(model="pixelis-nano", input=[{"role": "user", "content": parts}]) as events:
        kinds = [(e.type, getattr(e, "delta", None)) for e in events if "reasoning" in e.type]
        final = events.get_final_response()
    assert kinds == [
        *(("response.reasoning_text.delta", letter) for letter in "zoom"),
        ("response.reasoning_text.done", None),
    ]
    assert [item.type for item in final.output] == ["reasoning", "mcp_call", "message"]


def test_turns_are_sent_without_delay(deployed: Deployed) -> None:
    body = {
        "question": "pause 0.5 say 7",
        "image": picture_url(),
        "stream": True,
        "learn": False,
        "samples": 1,
    }
    times = []
    with deployed.client() as client, client.stream("POST", "/v1/agent", json=body) as response:
        for _ in response.iter_raw():
            times.append(time.monotonic())
    # Three turns with pauses between; the first ones may have been read late
    assert times[-1] - times[0] > 0.9
    assert len([t for t in times if times[-1] - t > 0.2]) >= 3


def test_the_official_client_sees_turns_and_the_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="pixelis-nano",
        messages=messages("say 7", picture_url()),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    turns = [
        c.model_extra["pixelis"]["event"]
        for c in chunks
        if c.model_extra and "event" in c.model_extra.get("pixelis", {})
    ]
    assert len(turns) == 12
    assert {t["turn"]["role"] for t in turns} == {"assistant", "tool"}
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "7"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-2].model_extra is not None
    assert chunks[-2].model_extra["pixelis"]["confidence"] == 1.0
    assert len({c.id for c in chunks}) == 1


@pytest.mark.parametrize(
    ("question", "code"),
    [("refuse0 refuse1", "unavailable"), ("break", "internal_error"), ("wait 30", "timeout")],
)
def test_a_failure_is_the_last_event(
    deployed: Deployed, client: openai.OpenAI, question: str, code: str
) -> None:
    before = deployed.counters()["cancelled"]
    (name, data), *more = streamed(deployed, question)
    assert (name, data["error"]["code"], more) == ("error", code, [])
    assert "secret" not in json.dumps(data)
    if code == "timeout":
        assert until(lambda: deployed.counters()["cancelled"] > before)
        return
    with pytest.raises(openai.APIError) as caught:
        list(
            client.chat.completions.create(
                model="pixelis-nano", messages=messages(question, picture_url()), stream=True
            )
        )
    assert caught.value.code == code


def test_an_invalid_request_gets_a_status_instead_of_a_stream(
    deployed: Deployed, client: openai.OpenAI
) -> None:
    broken = picture_url()[:100]
    for image, code in (("file:///etc/passwd", "image_scheme"), (broken, "image_undecodable")):
        with deployed.client() as http:
            response = http.post("/v1/agent", json={"question": "q", "image": image, "stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="pixelis-nano", messages=messages("q", image), stream=True)


def test_disconnecting_from_a_stream_cancels_the_work(deployed: Deployed) -> None:
    before = deployed.counters()
    body = {"question": "pause 0.3 say 7", "image": picture_url(), "stream": True, "learn": False}
    with deployed.client() as client, client.stream("POST", "/v1/agent", json=body) as response:
        next(events(response.iter_lines()))  # one turn is enough
    assert until(lambda: deployed.counters()["closed"] > before["closed"])
    assert deployed.counters()["streamed"] == before["streamed"]
    with deployed.client() as client:  # and its place in the queue is free
        assert until(
            lambda: (
                re.search(r"^pixelis_inside{.*} 0.0$", client.get("/metrics").text, re.MULTILINE) is not None
            )
        )


def test_open_streams_count_against_admission(deployed: Deployed) -> None:
    body = {"question": "pause 0.4 say 7", "image": picture_url(), "stream": True, "learn": False}
    with deployed.client() as client:
        open_streams = [client.stream("POST", "/v1/agent", json=body) for _ in range(6)]
        responses = [stream.__enter__() for stream in open_streams]
        try:
            assert [r.status_code for r in responses] == [200] * 6
            shed = client.post("/v1/agent", json=body)
            assert (shed.status_code, shed.json()["error"]["code"]) == (429, "overloaded")
            assert [list(events(r.iter_lines()))[-1][0] for r in responses[:4]] == ["answer"] * 4
        finally:
            for stream in open_streams:
                stream.__exit__(None, None, None)
