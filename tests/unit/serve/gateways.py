"""A gateway without the actors behind it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI
from fastapi.testclient import TestClient

from pixelis.config import load
from pixelis.serve.agent import Agent
from pixelis.serve.gateway import create_app
from pixelis.serve.keys import digest
from pixelis.serve.state import GatewayState


def client(*overrides: str, required: str = "", key: str | None = None, **agent: Any) -> TestClient:
    """A client that sends ``key``, by default the one that the gateway requires."""
    backends = SimpleNamespace(evolution=None, episodes=None)
    parts = {"backends": backends, "memory": None, "version": None, "counts": Counter(), **agent}
    config = load(None, list(overrides))
    state = GatewayState(
        config, cast(Agent, SimpleNamespace(**parts)), digest(required) if required else None
    )
    key = required if key is None else key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return TestClient(create_app(state), base_url="http://localhost", headers=headers)


def state_of(client: TestClient) -> GatewayState:
    return cast(FastAPI, client.app).state.gateway
