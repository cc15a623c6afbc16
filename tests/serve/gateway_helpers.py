"""Helpers of the gateway tests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import ray
from scripted import KEY

from pixelis.config import Config
from pixelis.policy.adapters import Adapter
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import Backends
from pixelis.serve.gateway import create_app
from pixelis.serve.state import GatewayState

STORE = "store-under-test"


@contextlib.asynccontextmanager
async def own_client(
    config: Config, backends: Backends, host: str = "localhost"
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway without a key in this process."""
    app = create_app(GatewayState(config, Agent(config, backends), None))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}", timeout=60) as client:
            yield client


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
