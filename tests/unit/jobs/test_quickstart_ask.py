"""The quickstart's requests: an overloaded service is asked again, one that fails is named."""

from __future__ import annotations

import pytest
from chat_server import ChatServer

from pixelis.datasets.questions import read_questions
from pixelis.errors import InfraFailure
from pixelis.jobs import quickstart


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
