"""Helpers of the gateway tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import ray
from scripted import KEY

from pixelis.policy.adapters import Adapter

STORE = "store-under-test"


def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
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
    for internal in ("Traceback", "pixelis/", "ray::", "secret internals", KEY):
        assert internal not in response.text
    return body["error"]


def publish(value: float) -> int:
    """Publish a candidate in the store of the deployed service."""
    tensors = {"layer.A": np.full((2, 3), value, np.float32), "layer.B": np.full((4, 2), value, np.float32)}
    store = ray.get_actor(STORE)
    return ray.get(store.publish.remote(Adapter(tensors, 2, 2, "base"), "evolve", 0, {}, False))
