"""The quickstart's requests: an overloaded service is asked again, one that fails is named."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pixelis.datasets.questions import read_questions
from pixelis.errors import InfraFailure
from pixelis.jobs import quickstart


@pytest.fixture
def statuses() -> Iterator[tuple[str, list[int]]]:
    """URL of a service that answers with these statuses in turn, then with 200."""
    queue: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(queue.pop(0) if queue else 200)
            body = json.dumps({"answer": "7"}).encode()
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", queue
    server.shutdown()
    server.server_close()


def test_an_overloaded_service_is_asked_again(
    statuses: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, queue = statuses
    monkeypatch.setattr(quickstart.time, "sleep", lambda _: None)
    (question,) = read_questions("cards:?split=test", limit=1, epochs=1)
    queue += [504, 503]
    assert quickstart.ask(url, question)["answer"] == "7"
    assert queue == []
    queue += [504] * quickstart.ATTEMPTS
    with pytest.raises(InfraFailure, match="504") as failure:
        quickstart.ask(url, question)
    assert "resumes" in (failure.value.fix or "")
    queue += [500]
    with pytest.raises(InfraFailure, match="500"):
        quickstart.ask(url, question)
