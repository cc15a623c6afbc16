"""Answers as they are made, over real HTTP: chunks for the official client, server-sent events of /v1/agent."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from asking import messages, until
from scripted import KEY, Deployed, picture_url

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(deployed: Deployed) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and data of server-sent events; comments are left out."""
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


def test_turns_arrive_before_the_answer(deployed: Deployed) -> None:
    got = streamed(deployed, "say 7,8,7,7")
    assert [name for name, _ in got] == ["turn"] * 12 + ["answer"]
    assert {(data["sample"], data["samples"]) for name, data in got if name == "turn"} == {(i, 4) for i in range(4)}
    seen = [data for _, data in got if data.get("turn", {}).get("observation")]
    assert len(seen) == 4
    assert seen[0]["images"][0]["box"] == [0.25, 0.25, 0.75, 0.75]
    assert seen[0]["images"][0]["uri"].startswith("data:image/png;base64,")
    answer = got[-1][1]
    assert (answer["object"], answer["answer"], answer["confidence"]) == ("agent.answer", "7", 0.75)
    assert answer["experience_id"].startswith("exp_")


def test_the_first_byte_and_the_turns_come_at_once(deployed: Deployed) -> None:
    body = {"question": "pause 0.5 say 7", "image": picture_url(), "stream": True, "learn": False, "samples": 1}
    at = []
    with deployed.client() as client, client.stream("POST", "/v1/agent", json=body) as response:
        for _ in response.iter_raw():
            at.append(time.monotonic())
    assert at[-1] - at[0] > 0.9  # three turns with pauses between; what came first may have been read late
    assert len([t for t in at if at[-1] - t > 0.2]) >= 3


def test_the_official_client_sees_turns_and_the_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="pixelis-nano", messages=messages("say 7", picture_url()), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    turns = [c.model_extra["pixelis"]["event"] for c in chunks if c.model_extra and "event" in c.model_extra.get("pixelis", {})]
    assert len(turns) == 12
    assert {t["turn"]["role"] for t in turns} == {"assistant", "tool"}
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "7"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-2].model_extra is not None
    assert chunks[-2].model_extra["pixelis"]["confidence"] == 1.0
    assert len({c.id for c in chunks}) == 1


@pytest.mark.parametrize(
    ("question", "code"), [("refuse0 refuse1", "unavailable"), ("break", "internal_error"), ("wait 30", "timeout")]
)
def test_what_fails_on_the_way_is_the_last_event(deployed: Deployed, client: openai.OpenAI, question: str, code: str) -> None:
    before = deployed.counters()["cancelled"]
    (name, data), *more = streamed(deployed, question)
    assert (name, data["error"]["code"], more) == ("error", code, [])
    assert "secret" not in json.dumps(data)
    if code == "timeout":
        assert until(lambda: deployed.counters()["cancelled"] > before)
        return
    with pytest.raises(openai.APIError) as caught:
        list(client.chat.completions.create(model="pixelis-nano", messages=messages(question, picture_url()), stream=True))
    assert caught.value.code == code


def test_what_is_wrong_with_the_request_is_a_status_not_a_stream(deployed: Deployed, client: openai.OpenAI) -> None:
    broken = picture_url()[:100]
    for image, code in (("file:///etc/passwd", "image_scheme"), (broken, "image_undecodable")):
        with deployed.client() as http:
            response = http.post("/v1/agent", json={"question": "q", "image": image, "stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="pixelis-nano", messages=messages("q", image), stream=True)


def test_a_caller_who_leaves_a_stream_ends_the_work(deployed: Deployed) -> None:
    before = deployed.counters()
    body = {"question": "pause 0.3 say 7", "image": picture_url(), "stream": True, "learn": False}
    with deployed.client() as client, client.stream("POST", "/v1/agent", json=body) as response:
        next(events(response.iter_lines()))  # one turn is enough
    assert until(lambda: deployed.counters()["closed"] > before["closed"])
    assert deployed.counters()["streamed"] == before["streamed"]
    with deployed.client() as client:  # nor does it hold a place in the queue
        assert until(lambda: re.search(r"^pixelis_inside{.*} 0.0$", client.get("/metrics").text, re.MULTILINE) is not None)


def test_streams_count_as_requests_inside(deployed: Deployed) -> None:
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
