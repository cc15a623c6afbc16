"""A real HTTP server that plays a list of chat replies: what a language model might say, for tests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer:
    """``replies``: text, bytes (raw), (status, headers), seconds to stall, or a function of the messages."""

    def __init__(self, *replies: Any):
        self.replies: list[Any] = list(replies) or ["hello"]
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reply = outer.replies[min(len(outer.requests), len(outer.replies) - 1)]
                outer.requests.append({"path": self.path, **body})
                outer.headers.append(dict(self.headers))
                if isinstance(reply, float):
                    time.sleep(reply)
                    reply = "late"
                if isinstance(reply, Callable):
                    reply = reply(body["messages"])
                status, extra = reply if isinstance(reply, tuple) else (200, {})
                data = json.dumps({"choices": [{"message": {"content": str(reply)}}]}).encode()
                data = reply if isinstance(reply, bytes) else data
                try:
                    self.send_response(status)
                    for name, value in {**extra, "Content-Length": str(len(data))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # the client has given up

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self.http.shutdown()
        self.http.server_close()
