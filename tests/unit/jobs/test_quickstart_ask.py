"""The quickstart's requests: an overloaded service is asked again, one that fails is named."""

from __future__ import annotations

import pytest
from chat_server import ChatServer

from pixelis.config import ToolboxConfig
from pixelis.datasets.media import open_media
from pixelis.datasets.questions import read_questions
from pixelis.errors import InfraFailure
from pixelis.jobs import quickstart
from pixelis.operations.video import open_clip


def test_an_overloaded_service_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart.time, "sleep", lambda _: None)
    (question,) = read_questions("cards:?split=test", limit=1, epochs=1)
    busy = [(504, {})] * quickstart.ATTEMPTS
    server = ChatServer((504, {}), (503, {}), b'{"answer": "7"}', *busy, (500, {}))
    url = server.url.removesuffix("/v1")
    assert quickstart.ask(url, question)["answer"] == "7"
    with pytest.raises(InfraFailure, match="504") as failure:
        quickstart.ask(url, question)
    assert "resumes" in (failure.value.fix or "")
    with pytest.raises(InfraFailure, match="500"):
        quickstart.ask(url, question)
    server.close()


def test_a_clip_is_sent_whole() -> None:
    (question,) = read_questions("cards:?split=test&clips=1", limit=1, epochs=1)
    clip = open_media(question.media[0], ToolboxConfig())
    sent = open_clip(quickstart.film_url(clip), ToolboxConfig())
    assert sent.times.tolist() == pytest.approx(clip.times.tolist())
    assert (sent.width, sent.height) == (clip.width, clip.height)
    for shown, original in zip(sent.frames(range(5)), clip.frames(range(5)), strict=True):
        assert abs(shown.astype(int) - original).mean() < 4
