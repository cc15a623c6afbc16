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
from pydantic import ValidationError

from pixelis.config import ToolboxConfig
from pixelis.errors import (
    BadConfig,
    InfraFailure,
    MissingDependency,
    OperationError,
    first_problem,
    install_extra,
)
from pixelis.operations.encoded import decode_base64
from pixelis.operations.environment import Environment, EnvironmentResult, server_url
from pixelis.operations.function import function_operation
from pixelis.operations.image import load_image
from pixelis.operations.video import Clip
from pixelis.records import Action, Function, Question

try:
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import ClientConnection, connect
except ImportError:
    raise MissingDependency(
        "toolbox.environments: openenv needs the package websockets", fix=install_extra("openenv")
    ) from None

KEY = "toolbox.environments"
SHARE = 0.75
"""Part of toolbox.timeout_s that a server may take: after all of it the toolbox ends, with all its episodes."""
REFUSED = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Codes of errors that an action causes."""
ENCODED = ("iVBORw0KGgo", "/9j/")
"""How PNG and JPEG begin in base64."""


class OpenEnvEnvironment(Environment):
    """A session with a server; the action ``step`` has the schema of the server's actions.

    Pictures of an observation (base64, a ``data:`` URL, or lists of [H, W, 3]) are views, the rest is JSON.
    """

    url: ClassVar[str]
    settings: ClassVar[ToolboxConfig]
    _socket: ClientConnection | None = None

    def reset(
        self, question: Question, media: Mapping[str, np.ndarray | Clip], seed: int
    ) -> EnvironmentResult:
        timeout_s, size = SHARE * self.settings.timeout_s, 4 * self.settings.max_image_bytes
        try:
            self._socket = connect(
                f"ws{self.url.removeprefix('http')}/ws", open_timeout=timeout_s, max_size=size
            )
        except (OSError, WebSocketException) as error:
            raise _lost(self.url, error) from None
        return self._exchange("reset", {"seed": seed})

    def execute(self, action: Action) -> EnvironmentResult:
        return self._exchange("step", action.arguments)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close_timeout = 0
            self._socket.close()

    def _exchange(self, kind: str, data: Mapping[str, Any]) -> EnvironmentResult:
        assert self._socket is not None
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(self._socket.recv(SHARE * self.settings.timeout_s))
        except (OSError, WebSocketException, ValueError) as error:
            raise _lost(self.url, error) from None
        data = reply["data"]
        if reply["type"] == "error":
            message = str(data.get("message"))
            if kind == "step" and data.get("code") in REFUSED:
                raise OperationError(message, code="tool_error")
            raise InfraFailure(f"{self.url}: {message}", code="environment_lost")
        text, images = self._shown(data["observation"])
        return EnvironmentResult(text, images, float(data.get("reward") or 0.0), bool(data["done"]))

    def _shown(self, observation: Mapping[str, Any]) -> tuple[str, list[np.ndarray]]:
        images, others = list[np.ndarray](), dict[str, Any]()
        limits = self.settings.max_image_bytes, self.settings.max_image_pixels
        for key, value in observation.items():
            if isinstance(value, str) and value.startswith("data:image/"):
                images.append(load_image(value, *limits))
            elif isinstance(value, str) and value.startswith(ENCODED):
                images.append(load_image(decode_base64(value), *limits))
            elif isinstance(value, list) and (pixels := np.asarray(value)).shape[2:] == (3,):
                images.append(pixels.astype(np.uint8))
            elif value is not None:
                others[key] = value
        values = list(others.values())
        is_text = len(values) == 1 and isinstance(values[0], str)
        return values[0] if is_text else json.dumps(others, ensure_ascii=False) if others else "", images


def openenv_environment(rest: str, settings: ToolboxConfig) -> type[Environment]:
    """The class of an entry without `openenv`; the server is asked once in a process for its name and schema."""
    url = server_url(f"{KEY}: openenv{rest}", rest).rstrip("/")
    name, step = _offer(url, SHARE * settings.timeout_s)
    body = {"name": name, "actions": (step,), "url": url, "settings": settings}
    return type("OpenEnvServer", (OpenEnvEnvironment,), body)


@functools.cache
def _offer(url: str, timeout_s: float) -> tuple[str, type]:
    try:
        with httpx.Client(timeout=timeout_s) as client:
            about, schema = (
                client.get(f"{url}/{path}").raise_for_status().json() for path in ("metadata", "schema")
            )
    except (httpx.HTTPError, ValueError) as error:
        raise _lost(url, error) from None
    try:
        parameters = dict(schema["action"])
        parameters["properties"] = {k: v for k, v in parameters["properties"].items() if k != "metadata"}
        step = Function(
            name="step", description=about.get("description") or "One step.", parameters=parameters
        )
        return about["name"], function_operation(step)
    except KeyError as error:
        raise BadConfig(f"{KEY}: {url} lacks {error}", fix="serve it with openenv-core 0.3") from None
    except ValidationError as error:
        problem = first_problem(error).message
        raise BadConfig(f"{KEY}: the actions of {url}: {problem}", fix="correct the server") from None


def _lost(url: str, error: Exception) -> InfraFailure:
    is_late = isinstance(error, TimeoutError | httpx.TimeoutException)
    message = f"{KEY}: openenv+{url}: {type(error).__name__}: {error}"
    code = "environment_timeout" if is_late else "environment_lost"
    return InfraFailure(message, code=code, fix="start the server, or correct the entry")
