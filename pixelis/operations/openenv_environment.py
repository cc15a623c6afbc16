"""Environments that an OpenEnv server serves: an entry `openenv+https://...`.

The client is written from the server's protocol (openenv-core 0.3: GET /metadata and /schema, and a WebSocket at
/ws whose messages are reset, step, close, observation and error): that package pins what ours cannot have.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import httpx
import numpy as np
from websockets.sync.client import ClientConnection, connect

from pixelis.errors import InfraFailure, OperationError
from pixelis.operations.environment import Entry, Environment, EnvironmentResult
from pixelis.operations.image import load_image
from pixelis.operations.video import Clip
from pixelis.records import Action, Question

REFUSED = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Codes of errors that an action causes."""
ENCODED = ("iVBORw0KGgo", "/9j/")
"""How PNG and JPEG begin in base64."""


class OpenEnvEnvironment(Environment):
    """A session with a server; the action ``step`` has the schema of the server's actions.

    Pictures of an observation (base64, a ``data:`` URL, or lists of [H, W, 3]) are views, the rest is JSON.
    """

    entry: ClassVar[Entry]
    _socket: ClientConnection | None = None

    def reset(
        self, question: Question, media: Mapping[str, np.ndarray | Clip], seed: int
    ) -> EnvironmentResult:
        address = f"ws{_address(self.entry).removeprefix('http')}/ws"
        with self.entry.connection():
            self._socket = connect(
                address, open_timeout=self.entry.timeout_s, max_size=4 * self.entry.limits[0]
            )
        return self._exchange("reset", {"seed": seed})

    def execute(self, action: Action) -> EnvironmentResult:
        return self._exchange("step", action.arguments)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close_timeout = 0
            self._socket.close()

    def _exchange(self, kind: str, data: Mapping[str, Any]) -> EnvironmentResult:
        assert self._socket is not None
        with self.entry.connection():
            self._socket.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(self._socket.recv(self.entry.timeout_s))
        data = reply["data"]
        if reply["type"] == "error":
            message = str(data.get("message"))
            if kind == "step" and data.get("code") in REFUSED:
                raise OperationError(message, code="tool_error")
            raise InfraFailure(f"{self.entry}: {message}", code="environment_lost")
        text, images = self._shown(data["observation"])
        return EnvironmentResult(text, images, float(data.get("reward") or 0.0), bool(data["done"]))

    def _shown(self, observation: Mapping[str, Any]) -> tuple[str, list[np.ndarray]]:
        images, others = list[np.ndarray](), dict[str, Any]()
        for key, value in observation.items():
            if isinstance(value, str) and value.startswith(("data:image/", *ENCODED)):
                url = value if value.startswith("data:") else f"data:;base64,{value}"
                images.append(load_image(url, *self.entry.limits))
            elif isinstance(value, list) and (pixels := np.asarray(value, object)).shape[2:] == (3,):
                images.append(pixels.astype(np.uint8))
            elif value is not None:
                others[key] = value
        return json.dumps(others, ensure_ascii=False) if others else "", images


@functools.cache
def adapt(entry: Entry) -> type[OpenEnvEnvironment]:
    """The class of a server, which is asked once in a process for its name and schema."""
    with entry.connection(), httpx.Client(base_url=_address(entry), timeout=entry.timeout_s) as client:
        about, schema = (client.get(path).raise_for_status().json() for path in ("/metadata", "/schema"))
        parameters = dict(schema["action"])
        parameters["properties"] = {k: v for k, v in parameters["properties"].items() if k != "metadata"}
        step = entry.action("step", about.get("description") or "One step.", parameters)
        body = {"name": about["name"], "actions": (step,), "entry": entry}
    return type("OpenEnvServer", (OpenEnvEnvironment,), body)


def _address(entry: Entry) -> str:
    return entry.url().geturl().rstrip("/")
