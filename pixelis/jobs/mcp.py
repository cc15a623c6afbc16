"""Serve the pixel operations as tools of the Model Context Protocol.

No model and no Ray: a host (an agent, an editor) starts this command, or connects to it, and calls the operations.

usage: pixelis mcp [--root DIR] [--http [HOST:]PORT] [toolbox.KEY=VALUE ...]

  --root DIR            pictures and clips below this folder may be named by their paths; without it, none
  --http [HOST:]PORT    serve http://HOST:PORT/mcp on this machine instead of stdin and stdout (127.0.0.1)

`image` of a call is a path below --root, a data: URL, or the id of an earlier picture or result (img0, obs1).
Coordinates are 0..1 of it: a box is [left, top, right, bottom], a point [x, y]. The latest 16 pictures and clips
are kept. toolbox.operations names the operations (pixelis operate --list).

example of a host's configuration:
  {"mcpServers": {"pixelis": {"command": "pixelis", "args": ["mcp", "--root", "/home/me/pictures"]}}}

exit code: 0 the host has left, 2 the command line is wrong
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from pixelis import __version__
from pixelis.config import DialogueConfig, ToolboxConfig, load
from pixelis.dialogue.agent import name_observation
from pixelis.errors import BadConfig, BadInput, MissingDependency, OperationError, install_extra
from pixelis.jobs.command import command
from pixelis.jobs.operate import CLIP_OPERATIONS, open_source
from pixelis.operations import Operation, Scene, execute, select
from pixelis.operations.image import png_url
from pixelis.operations.media import first_look
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.scale import PLACES
from pixelis.operations.video import Clip
from pixelis.records import Action, ImageView, Observation

MAX_MEDIA = 16
VIEW = PixelBudget(256**2, 1024**2)
"""Size of the pictures of results, which hosts shrink above this."""
IMAGE = {
    "type": "string",
    "description": "a path below the root folder, a data: URL, or the id of an earlier picture or result",
}
IMAGE_ARGUMENTS = ("image", *sorted({place.image for place in PLACES.values()} - {"target"}))
"""Arguments that name a picture: that of the call, and those of operations on two pictures."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Desk:
    """The pictures and clips that calls have named, and the results so far."""

    def __init__(self, settings: ToolboxConfig, root: Path | None):
        self.settings, self.root = settings, None if root is None else root.resolve()
        self.media = dict[str, np.ndarray | Clip]()
        self.names = dict[str, str]()  # of media, by hashes of their sources
        self.images, self.objects = list[ImageView](), dict[str, dict[str, Any]]()
        self.opened = self.successes = 0

    def call(
        self, operation: type[Operation], arguments: Mapping[str, Any]
    ) -> tuple[Observation, list[np.ndarray]]:
        """The observation of an operation with its id and views, uint8 [h, w, 3]; errors are observations."""
        arguments, target = dict(arguments), ""
        try:
            for key in IMAGE_ARGUMENTS:
                if isinstance(source := arguments.get(key), str):
                    arguments[key] = self._open(source, operation.name in CLIP_OPERATIONS)
            if operation.targeted and not isinstance(target := arguments.pop("image", None), str):
                raise OperationError("image: Field required", code="bad_arguments")
        except (BadInput, OperationError, OSError) as error:
            code = getattr(error, "code", "bad_target")
            return Observation(status="error", code=code, text=str(error)), []
        action = Action(op=operation.name, target=target, arguments=arguments)
        scene = Scene(self.media, self.images, self.objects, VIEW, VIEW, kind="unit", settings=self.settings)
        observation, views = execute(action, scene, {operation.name: operation})
        if observation.status == "ok":
            observation = name_observation(observation, self.successes)
            self.successes += 1
            self.images += observation.images
            self.objects |= {item["id"]: item for item in observation.data.get("objects", [])}
        return observation, views

    def _open(self, source: str, moving: bool) -> str:
        if source in self.media or any(image.id == source for image in self.images):
            return source
        key = source
        if not source.lower().startswith("data:"):
            path = self._below_root(source)
            source, key = str(path), f"{path} {path.stat().st_mtime_ns}"
        key = hashlib.sha256(f"{key} {moving}".encode()).hexdigest()
        if self.names.get(key) not in self.media:
            _, item = open_source(source, moving, self.settings)
            name = f"{'vid' if isinstance(item, Clip) else 'img'}{self.opened}"
            images, _ = first_look({name: item}, DialogueConfig(), 1)
            self.opened += 1
            self.media[name], self.names[key] = item, name
            self.images += images
            if len(self.media) > MAX_MEDIA:
                del self.media[next(iter(self.media))]
        return self.names[key]

    def _below_root(self, source: str) -> Path:
        if self.root is None:
            raise OperationError("paths are not opened without --root: send a data: URL", code="bad_target")
        path = (self.root / source).resolve()
        if not path.is_relative_to(self.root):
            raise OperationError(f"{source[-100:]} is not below the root folder", code="bad_target")
        if not path.is_file():
            raise OperationError(f"no file {source[-100:]} below the root folder", code="bad_target")
        return path


def schema(operation: type[Operation]) -> dict[str, Any]:
    """The JSON schema of a tool: the operation's own arguments, and `image`."""
    own = operation.Arguments.model_json_schema()
    properties = dict(own.get("properties", {}))
    for name in properties.keys() & PLACES.keys():
        numbers = "left, top, right, bottom" if PLACES[name].count == 4 else "x, y"
        told = f"{properties[name].get('description', '')}: {numbers} in 0 to 1 of the image"
        properties[name] = {**properties[name], "description": told.removeprefix(": ")}
    required = own.get("required", [])
    if operation.targeted:
        properties, required = {"image": IMAGE, **properties}, ["image", *required]
    return {**own, "properties": properties, "required": required}


def make_server(desk: Desk, operations: Sequence[type[Operation]]) -> Any:
    """The server of the SDK; calls run one at a time, each in toolbox.timeout_s."""
    try:
        from mcp import types
        from mcp.server.lowlevel import Server
    except ImportError:
        message = "pixelis mcp needs the package mcp"
        raise MissingDependency(message, fix=install_extra("mcp")) from None
    by_name = {operation.name: operation for operation in operations}
    one, timeout_s = anyio.CapacityLimiter(1), desk.settings.timeout_s

    async def list_tools(*_: Any) -> types.ListToolsResult:
        tools = [
            types.Tool(name=o.name, description=o.description, input_schema=schema(o)) for o in operations
        ]
        return types.ListToolsResult(tools=tools)

    async def call_tool(_: Any, request: types.CallToolRequestParams) -> types.CallToolResult:
        if (operation := by_name.get(request.name)) is None:
            return _failed("unknown_op", f"no operation {request.name[:30]}, use {', '.join(by_name)}")
        call = functools.partial(desk.call, operation, request.arguments or {})
        try:
            with anyio.fail_after(timeout_s):
                observation, views = await anyio.to_thread.run_sync(call, limiter=one, abandon_on_cancel=True)
        except TimeoutError:
            return _failed("timeout", f"{operation.name} took longer than {timeout_s:g} s")
        if observation.status == "error":
            return _failed(observation.code or "", observation.text)
        shown = (f"{i.id}: {i.view_size[0]} x {i.view_size[1]} pixels" for i in observation.images)
        text = "\n".join(filter(None, [observation.text, *shown]))
        content: list[Any] = [types.TextContent(text=text)]
        for view in views:
            data = png_url(view).partition(",")[2]
            content.append(types.ImageContent(data=data, mime_type="image/png"))
        return types.CallToolResult(content=content)

    def _failed(code: str, text: str) -> types.CallToolResult:
        return types.CallToolResult(content=[types.TextContent(text=f"{code}: {text}")], is_error=True)

    return Server("pixelis", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)


def main() -> None:
    with command("mcp", __doc__) as parser:
        parser.add_argument("--root", type=Path)
        parser.add_argument("--http")
        parser.add_argument("words", nargs="*")
        options = parser.parse_intermixed_args()
        settings = load(overrides=options.words).toolbox
        if options.root is not None and not options.root.is_dir():
            raise BadConfig(f"--root {options.root} is no folder")
        operations = select(settings.operations)
        server = make_server(Desk(settings, options.root), operations)
        address = None if options.http is None else _address(options.http)
        for operation in operations:
            operation.ready(settings)
        if address is None:
            anyio.run(_serve_stdio, server)
        else:
            import uvicorn

            host, port = address
            uvicorn.run(server.streamable_http_app(host=host), host=host, port=port, log_level="warning")


async def _serve_stdio(server: Any) -> None:
    from mcp.server.stdio import stdio_server

    async with stdio_server() as streams:
        await server.run(*streams, server.create_initialization_options())


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or LOOPBACK[0]
    if host not in LOOPBACK or not port.isdigit():
        fix = f"write [HOST:]PORT with a host of {', '.join(LOOPBACK)}; a proxy can ask others for a key"
        raise BadConfig(f"--http {text} is no address of this machine", fix=fix)
    return host, int(port)


if __name__ == "__main__":
    main()
