"""Serve the pixel operations as tools of the Model Context Protocol.

No model and no Ray: a host (an agent, an editor) starts this command, or connects to it, and calls the operations.

usage: pixelis mcp [--root DIR] [--http PORT] [toolbox.KEY=VALUE ...]

  --root DIR    pictures and clips below this folder may be named by their paths; without it, none
  --http PORT   serve http://127.0.0.1:PORT/mcp instead of stdin and stdout

`image` of a call is a path below --root, a data: URL, or the id of an earlier result (obs1). Coordinates are
0..1 of it: a box is [left, top, right, bottom], a point [x, y]. The latest 16 pictures and clips are kept. Calls
run one at a time: one that hangs holds up those after it. toolbox.operations names the operations
(pixelis operate --list).

example of a host's configuration:
  {"mcpServers": {"pixelis": {"command": "pixelis", "args": ["mcp", "--root", "/home/me/pictures"]}}}

exit code: 0 the host has left, 2 the command line is wrong
"""

from __future__ import annotations

from collections.abc import Mapping
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
from pixelis.operations.video import Clip
from pixelis.records import Action, ImageView, Observation

MAX_MEDIA = 16
VIEW = PixelBudget(256**2, 1024**2)
"""Size of the pictures of results, which hosts shrink above this."""
IMAGE = {
    "type": "string",
    "description": "a path below the root folder, a data: URL, or the id of an earlier result",
}
IMAGE_ARGUMENTS = ("image", "other", "like")
"""Arguments that name a picture: that of the call, and those of operations on two pictures."""
COORDINATES = "Coordinates are 0 to 1 of the image: a box is [left, top, right, bottom], a point [x, y]."


class Workspace:
    """The pictures and clips that calls have named, and the results so far."""

    def __init__(self, settings: ToolboxConfig, root: Path | None):
        self.settings, self.root = settings, None if root is None else root.resolve()
        self.operations = {operation.name: operation for operation in select(settings.operations)}
        self.media = dict[str, np.ndarray | Clip]()
        self.images, self.objects = dict[str, ImageView](), dict[str, dict[str, Any]]()
        self.successes = 0

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[Observation, list[np.ndarray]]:
        """The observation of an operation with its id and views, uint8 [h, w, 3]; errors are observations."""
        arguments = dict(arguments)
        try:
            for key in IMAGE_ARGUMENTS:
                if isinstance(source := arguments.get(key), str):
                    arguments[key] = self._open(source, name in CLIP_OPERATIONS)
        except (BadInput, OperationError) as error:
            return Observation(status="error", code=error.code, text=str(error)), []
        world = self.media, list(self.images.values()), self.objects
        scene = Scene(*world, VIEW, VIEW, kind="unit", settings=self.settings)
        action = Action(op=name, target=arguments.pop("image", ""), arguments=arguments)
        observation, views = execute(action, scene, self.operations)
        if observation.status == "ok":
            observation = name_observation(observation, self.successes)
            self.successes += 1
            self.images |= {image.id: image for image in observation.images}
            self.objects |= {item["id"]: item for item in observation.data.get("objects", [])}
        return observation, views

    def _open(self, source: str, moving: bool) -> str:
        """The id of a picture or clip, which is read again when its file has changed."""
        if source in self.media or source in self.images:
            return source
        version = 0
        if not source.lower().startswith("data:"):
            path = self._below_root(source)
            source, version = str(path), path.stat().st_mtime_ns
        name = f"media{hash((source, version, moving)) % 10**9}"
        if name not in self.media:
            _, item = open_source(source, moving, self.settings)
            views, _ = first_look({name: item}, DialogueConfig(), 1)
            self.images |= {view.id: view for view in views}
            self.media[name] = item
            if len(self.media) > MAX_MEDIA:
                del self.media[next(iter(self.media))]
        return name

    def _below_root(self, source: str) -> Path:
        if self.root is not None:
            path = (self.root / source).resolve()
            if path.is_relative_to(self.root) and path.is_file():
                return path
        raise OperationError(f"no file {source[-100:]} below the folder of --root", code="bad_target")


def schema(operation: type[Operation]) -> dict[str, Any]:
    """The JSON schema of a tool: the operation's own arguments, and `image`."""
    own = operation.Arguments.model_json_schema()
    if operation.targeted:
        own["properties"] = {"image": IMAGE, **own.get("properties", {})}
        own["required"] = ["image", *own.get("required", [])]
    return own


def make_server(workspace: Workspace) -> Any:
    """The server of the SDK with the operations as tools. Raises MissingDependency."""
    try:
        from mcp import types
        from mcp.server import MCPServer
    except ImportError:
        message = "pixelis mcp needs the package mcp"
        raise MissingDependency(message, fix=install_extra("mcp")) from None
    one = anyio.CapacityLimiter(1)

    class OperationServer(MCPServer):
        async def list_tools(self) -> list[types.Tool]:
            return [
                types.Tool(name=name, description=f"{o.description} {COORDINATES}", input_schema=schema(o))
                for name, o in workspace.operations.items()
            ]

        async def call_tool(
            self, name: str, arguments: dict[str, Any], _: Any = None
        ) -> types.CallToolResult:
            observation, views = await anyio.to_thread.run_sync(
                workspace.call, name, arguments, limiter=one, abandon_on_cancel=True
            )
            is_error = observation.status == "error"
            shown = (f"{i.id}: {i.view_size[0]} x {i.view_size[1]} pixels" for i in observation.images)
            text = f"{observation.code}: {observation.text}" if is_error else observation.text
            content: list[Any] = [types.TextContent(text="\n".join(filter(None, [text, *shown])))]
            for view in views:
                data = png_url(view).partition(",")[2]
                content.append(types.ImageContent(data=data, mime_type="image/png"))
            return types.CallToolResult(content=content, is_error=is_error)

    return OperationServer("pixelis", version=__version__, log_level="WARNING")


def main() -> None:
    with command("mcp", __doc__) as parser:
        parser.add_argument("--root", type=Path)
        parser.add_argument("--http", type=int)
        parser.add_argument("words", nargs="*")
        options = parser.parse_intermixed_args()
        settings = load(overrides=options.words).toolbox
        if options.root is not None and not options.root.is_dir():
            raise BadConfig(f"--root {options.root} is no folder")
        workspace = Workspace(settings, options.root)
        server = make_server(workspace)
        for operation in workspace.operations.values():
            operation.ready(settings)
        if options.http is None:
            server.run("stdio")
        else:
            server.run("streamable-http", port=options.http)


if __name__ == "__main__":
    main()
