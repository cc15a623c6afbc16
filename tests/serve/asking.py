"""What the tests of the gateway share: waiting for a condition, chat messages, errors in their one shape."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
from scripted import KEY


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def messages(text: str, *urls: Any) -> list[Any]:
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *pictures]}]


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "code", "param"}
    assert body["error"]["message"]
    for inside in ("Traceback", "pixelis/", "ray::", "secret internals", KEY):
        assert inside not in response.text
    return body["error"]
