"""Streams whose callers stop reading: they end soon after their deadline and give back what they hold."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pixelis.config import load
from pixelis.dialogue.session import SamplingParams
from pixelis.protocol.errors import ApiError
from pixelis.serve import responses
from pixelis.serve.agent_types import Pictures, TextEvent
from pixelis.serve.keys import Caller
from pixelis.serve.request_handler import respond
from pixelis.serve.state import GatewayState

TIMEOUT_S, LAST_S = 0.2, 0.2


class Endless:
    """An agent whose samples never end."""

    def __init__(self) -> None:
        self.closed = 0

    async def measure(self, query: Any) -> tuple[Any, int]:
        return query, 100

    async def decode(self, query: Any) -> Pictures:
        return Pictures([], {}, [], [])

    async def stream(self, query: Any, pictures: Pictures) -> Any:
        try:
            while True:
                yield TextEvent(sample=0, samples=1, text="a")
                await asyncio.sleep(0.01)
        finally:
            self.closed += 1


class Format:
    """A ReplyFormat of plain words."""

    caller, cache_key, stream = Caller(), None, True

    def __init__(self) -> None:
        self.query: Any = SimpleNamespace(sampling=SamplingParams())

    def stream_start(self) -> str:
        return "start"

    def stream_text(self, event: TextEvent) -> str:
        return event.text

    def stream_error(self, error: ApiError) -> str:
        return error.code


async def receive() -> dict[str, Any]:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits so long")


async def send_to(sent: list[bytes], reads: int | None) -> tuple[GatewayState, Endless]:
    """Stream to a caller that reads so many messages, or all of them, until the stream ends."""
    agent, format = Endless(), Format()
    state = GatewayState(load(None, ["engine.workers=1", f"serve.timeout_s={TIMEOUT_S}"]), agent, None)  # type: ignore[arg-type]
    response = await respond(state, format, asyncio.get_running_loop().time() + TIMEOUT_S)  # type: ignore[arg-type]
    assert state.pictures.used == 100

    async def send(message: Any) -> None:
        if reads is not None and len(sent) >= reads:
            await asyncio.sleep(60)
        sent.append(message.get("body", b""))

    await asyncio.wait_for(response({"type": "http"}, receive, send), 5)
    return state, agent


@pytest.mark.parametrize("reads", [0, 1, 5])
def test_a_caller_that_stops_reading_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    monkeypatch.setattr(responses, "LAST_S", LAST_S)
    state, agent = asyncio.run(send_to([], reads))
    assert (state.admission.free, state.pictures.used) == (state.admission.running, 0)
    assert agent.closed == (reads > 2)  # the first two messages are the status and the start


def test_a_caller_that_reads_is_told_of_the_deadline() -> None:
    sent: list[bytes] = []
    state, agent = asyncio.run(send_to(sent, None))
    assert sent[-2:] == [b"timeout", b""]
    assert (state.admission.free, state.pictures.used, agent.closed) == (state.admission.running, 0, 1)
