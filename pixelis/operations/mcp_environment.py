"""Servers of the Model Context Protocol as environments: an entry `mcp:COMMAND` or `mcp+https://...`.

Words `$NAME` before the command name variables of our environment that its process gets; a URL may name one
with a bearer token: `mcp+https://$NAME@host/path`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import shlex
import shutil
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any, ClassVar

import anyio
import httpx2
import mcp
import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp.client.streamable_http import streamable_http_client

from pixelis.errors import BadConfig, BadImage, MissingDependency, OperationError
from pixelis.operations.environment import Entry, Environment, EnvironmentResult
from pixelis.operations.image import load_image, png_url
from pixelis.operations.video import Clip
from pixelis.records import Action, Question


class McpEnvironment(Environment):
    """The tools of a server in one session an episode; a command is a process of its own, which ends with it.

    An argument that is the id of a picture of the question is sent as that picture, a ``data:`` URL. Pictures of
    a result are views; a result that ``isError`` is an error observation ``tool_error``.
    """

    is_default = True
    entry: ClassVar[Entry]

    def __init__(self) -> None:
        self._session = ExitStack()
        self._session.enter_context(suppress(Exception))  # at the end, of what ended the session before

    def reset(
        self, question: Question, media: Mapping[str, np.ndarray | Clip], seed: int
    ) -> EnvironmentResult:
        """Connect; the server's instructions are shown."""
        self._pictures = {id: item for id, item in media.items() if not isinstance(item, Clip)}
        with self.entry.connection():
            self._portal, self._client = self._session.enter_context(_session(self.entry))
        return EnvironmentResult(self._client.instructions or "")

    def execute(self, action: Action) -> EnvironmentResult:
        with self.entry.connection():
            result = self._portal.call(self._call, action.op, self._with_pictures(action.arguments))
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
        if result.is_error:
            raise OperationError("\n".join(texts) or f"{action.op} failed", code="tool_error")
        return EnvironmentResult("\n".join(texts), images)

    def close(self) -> None:
        """In a thread, since a server may take seconds to end."""
        threading.Thread(target=self._session.close, daemon=True).start()

    async def _call(self, name: str, arguments: dict[str, Any]) -> mcp.types.CallToolResult:
        try:
            with anyio.fail_after(self.entry.timeout_s):
                return await self._client.call_tool(name, arguments)
        except mcp.MCPError as error:
            if error.code == mcp.types.CONNECTION_CLOSED:
                raise
            raise OperationError(str(error), code="tool_error") from None

    def _picture(self, data: str) -> np.ndarray:
        try:
            return load_image(f"data:;base64,{data}", *self.entry.limits)
        except BadImage as error:
            raise OperationError(f"the tool returned no picture: {error}", code="tool_error") from None

    def _with_pictures(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._with_pictures(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._with_pictures(item) for item in value]
        picture = self._pictures.get(value) if isinstance(value, str) else None
        return value if picture is None else png_url(picture)


@functools.cache
def adapt(entry: Entry) -> type[McpEnvironment]:
    """The class of a server, which is connected to once in a process for its name and tools."""
    with entry.connection(), _session(entry) as (portal, client):
        tools, about = portal.call(_tools, client, entry.timeout_s), client.server_info
    actions = tuple(entry.action(tool.name, tool.description or "", tool.input_schema) for tool in tools)
    body = {"name": about.name if about else "", "actions": actions, "entry": entry}
    return type("McpServer", (McpEnvironment,), body)


@contextmanager
def _session(entry: Entry) -> Iterator[tuple[BlockingPortal, mcp.Client]]:
    """A session for calls through the portal, from a thread without an event loop."""
    with (
        start_blocking_portal(name="mcp") as portal,
        portal.wrap_async_context_manager(_connected(entry)) as client,
    ):
        yield portal, client


@asynccontextmanager
async def _connected(entry: Entry) -> AsyncIterator[mcp.Client]:
    with anyio.fail_after(entry.timeout_s) as starting:
        async with httpx2.AsyncClient(timeout=None) as http, mcp.Client(_server(entry, http)) as client:
            starting.deadline = math.inf
            yield client


def _server(entry: Entry, http: httpx2.AsyncClient) -> Any:
    """What the SDK connects to. Raises BadConfig and MissingDependency."""
    if entry.rest.startswith(":"):
        return _command(entry)
    url = entry.url()
    if url.username:
        http.headers["Authorization"] = f"Bearer {_variable(entry, url.username)}"
    address = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
    return streamable_http_client(address, http_client=http)


def _command(entry: Entry) -> mcp.StdioServerParameters:
    try:
        words = shlex.split(entry.rest[1:])
    except ValueError as error:
        raise BadConfig(f"{entry}: {error}", fix="quote the words as a shell needs it") from None
    names = list(itertools.takewhile(lambda word: word.startswith("$"), words))
    command, *arguments = words[len(names) :] or [""]
    if shutil.which(command) is None:
        fix = "install it on every node, or correct the entry"
        raise MissingDependency(f"{entry}: there is no command {command!r}", fix=fix)
    if shutil.which("setpriv"):  # Linux's kernel ends the server if the toolbox is killed
        command, arguments = "setpriv", ["--pdeathsig", "KILL", command, *arguments]
    variables = {name[1:]: _variable(entry, name) for name in names}
    return mcp.StdioServerParameters(command=command, args=arguments, env=variables)


def _variable(entry: Entry, word: str) -> str:
    value = os.environ.get(word[1:]) if word.startswith("$") else None
    if value is None:
        fix = "write $NAME, and set it on every node: secrets stay out of configurations"
        raise BadConfig(f"{entry}: {word[:40]!r} is no environment variable", fix=fix)
    return value


async def _tools(client: mcp.Client, timeout_s: float) -> list[mcp.Tool]:
    with anyio.fail_after(timeout_s):
        page = await client.list_tools()
        tools = list(page.tools)
        while page.next_cursor is not None:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
    return tools
