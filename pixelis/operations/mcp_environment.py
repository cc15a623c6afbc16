"""Servers of the Model Context Protocol as environments: an entry `mcp:COMMAND` or `mcp+https://...`.

Words `$NAME` before the command name variables of our environment that its process gets; a URL may name one
with a bearer token: `mcp+https://$NAME@host/path`.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import shlex
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import numpy as np
from pydantic import ValidationError

from pixelis.config import ToolboxConfig
from pixelis.errors import (
    BadConfig,
    BadImage,
    InfraFailure,
    MissingDependency,
    OperationError,
    PixelisError,
    first_problem,
    install_extra,
)
from pixelis.operations import lifeline
from pixelis.operations.encoded import decode_base64
from pixelis.operations.environment import Environment, EnvironmentResult, server_url
from pixelis.operations.function import function_operation
from pixelis.operations.image import load_image, png_url
from pixelis.operations.video import Clip
from pixelis.records import Action, Function, Question

try:
    import anyio
    import httpx2
    import mcp
    from anyio.from_thread import start_blocking_portal
    from mcp.client.streamable_http import streamable_http_client
except ImportError as error:
    raise MissingDependency(
        f"toolbox.environments: an MCP server needs the package {error.name}", fix=install_extra("mcp")
    ) from None

log = logging.getLogger(__name__)

KEY = "toolbox.environments"
SHARE = 0.75
"""Part of toolbox.timeout_s that a server may take: after all of it the toolbox ends, with all its episodes."""


@dataclass(frozen=True)
class Server:
    """How to reach a server: a ``url``, or ``words`` of a command. ``variables``: names of ours that it gets."""

    source: str
    words: tuple[str, ...] = ()
    url: str = ""
    variables: tuple[str, ...] = field(default=())

    @classmethod
    def read(cls, rest: str) -> Server:
        """From the entry without ``mcp``. Raises BadConfig and MissingDependency."""
        source = f"{KEY}: mcp{rest}"
        if rest.startswith("+"):
            url = urlsplit(server_url(source, rest))
            variables = [url.username] if url.username else []
            address = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
            server = cls(source, url=address, variables=_names(source, variables))
        else:
            try:
                words = shlex.split(rest[1:])
            except ValueError as error:
                raise BadConfig(f"{source}: {error}", fix="quote the words as a shell needs it") from None
            first = next((place for place, word in enumerate(words) if not word.startswith("$")), len(words))
            if not words[first:] or shutil.which(words[first]) is None:
                command = words[first] if words[first:] else ""
                fix = "install it on every node, or correct the entry"
                raise MissingDependency(f"{source}: there is no command {command!r}", fix=fix)
            server = cls(source, tuple(words[first:]), variables=_names(source, words[:first]))
        if missing := [name for name in server.variables if name not in os.environ]:
            fix = "set it on every node"
            raise BadConfig(f"{source}: the environment variable {missing[0]} is not set", fix=fix)
        return server

    @asynccontextmanager
    async def connected(self, timeout_s: float) -> AsyncIterator[mcp.Client]:
        """A session of its own. A process ends with it, and with this one."""
        values = {name: os.environ[name] for name in self.variables}
        with anyio.fail_after(timeout_s) as starting:
            async with AsyncExitStack() as stack:
                client = mcp.Client(self.url)
                if self.words:
                    command, *words = self.words
                    if sys.platform == "linux":
                        script = str(Path(lifeline.__file__).resolve())
                        words = ["-I", script, str(os.getpid()), command, *words]
                        command = sys.executable
                    client = mcp.Client(mcp.StdioServerParameters(command=command, args=words, env=values))
                elif values:
                    headers = {"Authorization": f"Bearer {next(iter(values.values()))}"}
                    http = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(timeout_s))
                    transport = streamable_http_client(
                        self.url, http_client=await stack.enter_async_context(http)
                    )
                    client = mcp.Client(transport)
                await stack.enter_async_context(client)
                starting.deadline = math.inf
                yield client


class Session:
    """A session for calls from a thread without an event loop. Raises InfraFailure ``environment_...``."""

    def __init__(self, server: Server, timeout_s: float):
        self.server, self.timeout_s, self._stack = server, timeout_s, ExitStack()
        self.is_open = False
        with self._failures(), self._stack:
            self._portal = self._stack.enter_context(start_blocking_portal(name="mcp"))
            connected = self._portal.wrap_async_context_manager(server.connected(timeout_s))
            self.client = self._stack.enter_context(connected)
            self._stack, self.is_open = self._stack.pop_all(), True

    def tools(self) -> list[mcp.Tool]:
        tools, cursor = list[mcp.Tool](), None
        while True:
            with self._failures():
                page = self._portal.call(
                    self._within, functools.partial(self.client.list_tools, cursor=cursor)
                )
            tools, cursor = [*tools, *page.tools], page.next_cursor
            if cursor is None:
                return tools

    def call(self, name: str, arguments: Mapping[str, Any]) -> mcp.types.CallToolResult:
        """Raises OperationError ``tool_error`` where the server refuses the call."""
        with self._failures():
            return self._portal.call(
                self._within, functools.partial(self.client.call_tool, name, dict(arguments))
            )

    def close(self) -> None:
        """In a thread, since a server may take seconds to end."""
        threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        try:
            self._stack.close()
        except Exception as error:  # what ended the session before
            log.info("the session with %s ended: %s", self.server.source, error)

    async def _within(self, request: Any) -> Any:
        with anyio.fail_after(self.timeout_s):
            return await request()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except PixelisError:
            raise
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            code = error.code if isinstance(error, mcp.MCPError) else None
            is_late = isinstance(error, TimeoutError) or code == mcp.types.REQUEST_TIMEOUT
            if code is not None and code != mcp.types.CONNECTION_CLOSED and not is_late and self.is_open:
                raise OperationError(str(error), code="tool_error") from None
            late = f"no answer in {self.timeout_s:g} s"
            raise InfraFailure(
                f"{self.server.source}: {late if is_late else f'{type(error).__name__}: {error}'}",
                code="environment_timeout" if is_late else "environment_lost",
                fix="run the server by itself, and see what it writes in the log of the toolbox",
            ) from error


class McpEnvironment(Environment):
    """The tools of a server in one session an episode.

    An argument that is the id of a picture of the question is sent as that picture, a ``data:`` URL. Pictures of
    a result are views; a result that ``isError`` is an error observation ``tool_error``.
    """

    is_default = True
    server: ClassVar[Server]
    settings: ClassVar[ToolboxConfig]
    _session: Session | None = None

    def reset(
        self, question: Question, media: Mapping[str, np.ndarray | Clip], seed: int
    ) -> EnvironmentResult:
        """Connect; the server's instructions are shown."""
        self._pictures = {id: item for id, item in media.items() if not isinstance(item, Clip)}
        self._session = Session(self.server, SHARE * self.settings.timeout_s)
        return EnvironmentResult(self._session.client.instructions or "")

    def execute(self, action: Action) -> EnvironmentResult:
        assert self._session is not None
        result = self._session.call(action.op, self._with_pictures(action.arguments))
        texts, images = list[str](), list[np.ndarray]()
        for block in result.content:
            if isinstance(block, mcp.types.TextContent):
                texts.append(block.text)
            elif isinstance(block, mcp.types.ImageContent):
                images.append(self._picture(block.data))
            elif isinstance(block, mcp.types.EmbeddedResource) and hasattr(block.resource, "text"):
                texts.append(block.resource.text)
            else:
                texts.append(f"({block.type} content, which cannot be shown)")
        if not result.content and result.structured_content is not None:
            texts.append(json.dumps(result.structured_content, ensure_ascii=False))
        if result.is_error:
            raise OperationError("\n".join(texts) or f"{action.op} failed", code="tool_error")
        return EnvironmentResult("\n".join(texts), images)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _picture(self, data: str) -> np.ndarray:
        limits = self.settings.max_image_bytes, self.settings.max_image_pixels
        try:
            return load_image(decode_base64(data), *limits)
        except (ValueError, BadImage) as error:
            raise OperationError(f"the tool returned no picture: {error}", code="tool_error") from None

    def _with_pictures(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._with_pictures(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._with_pictures(item) for item in value]
        picture = self._pictures.get(value) if isinstance(value, str) else None
        return value if picture is None else png_url(picture)


def mcp_environment(rest: str, settings: ToolboxConfig) -> type[Environment]:
    """The class of a server, which is connected to once in a process for its name and tools."""
    server = Server.read(rest)
    name, actions = _offer(server, SHARE * settings.timeout_s)
    body = {"name": name, "actions": actions, "server": server, "settings": settings}
    return type("McpServer", (McpEnvironment,), body)


@functools.cache
def _offer(server: Server, timeout_s: float) -> tuple[str, tuple[type, ...]]:
    session = Session(server, timeout_s)
    try:
        tools, about = session.tools(), session.client.server_info
    finally:
        session.close()
    if not tools:
        raise BadConfig(f"{server.source} has no tools", fix="remove the entry")
    actions = []
    for tool in tools:
        try:
            function = Function(
                name=tool.name, description=tool.description or "", parameters=tool.input_schema
            )
        except ValidationError as error:
            message = f"{server.source}: the tool {tool.name[:80]!r}: {first_problem(error).message}"
            raise BadConfig(message, fix="correct the server") from None
        actions.append(function_operation(function))
    return "" if about is None else about.name, tuple(actions)


def _names(source: str, words: list[str]) -> tuple[str, ...]:
    if wrong := [word for word in words if not (word.startswith("$") and word[1:].isidentifier())]:
        message = f"{source}: {wrong[0][:40]!r} is no environment variable"
        raise BadConfig(message, fix="write $NAME: secrets stay out of configurations")
    return tuple(word[1:] for word in words)
