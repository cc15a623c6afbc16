"""The operations over MCP, with the SDK's client as the host."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import subprocess
import sys
import time
from pathlib import Path

import mcp
import pytest
import skimage.data
from PIL import Image

from pixelis.config import ToolboxConfig
from pixelis.jobs.mcp import MAX_MEDIA, Workspace, main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.fromarray(skimage.data.coffee()).save(folder / "photo.png")
    (tmp_path / "secret.png").write_bytes((folder / "photo.png").read_bytes())
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    return folder


async def converse(client: mcp.Client) -> None:
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert list(tools) == ToolboxConfig().operations
    assert tools["zoom_in"].input_schema["required"] == ["image"]
    assert "a box is [left, top, right, bottom]" in tools["zoom_in"].description

    async def call(name: str, **arguments: object) -> tuple[str, list[Image.Image]]:
        result = await client.call_tool(name, arguments)
        text, *pictures = result.content
        assert isinstance(text, mcp.types.TextContent)
        return text.text, [Image.open(io.BytesIO(base64.b64decode(picture.data))) for picture in pictures]

    text, (view,) = await call("zoom_in", image="photo.png", box=[0.25, 0.25, 0.75, 0.75])
    assert text == f"obs1: {view.width} x {view.height} pixels"
    text, (closer,) = await call("zoom_in", image="obs1", box=[0, 0, 0.5, 0.5])
    assert closer.width / closer.height == pytest.approx(view.width / view.height, rel=0.02)
    file = io.BytesIO()
    Image.fromarray(skimage.data.coffee()).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    text, (same,) = await call("zoom_in", image=url, box=[0.25, 0.25, 0.75, 0.75])
    assert same.tobytes() == view.tobytes()
    text, _ = await call("segment_object_at", image="photo.png", point=[0.45, 0.5])
    found = text.split("object ")[1].split()[0].strip(":,.")
    assert "color" in (await call("get_properties", image="photo.png", object=found))[0]
    box = [0, 0, 0.5, 0.5]
    for image in ("../secret.png", "link.png", "/etc/hostname", "obs99"):
        assert (await call("zoom_in", image=image, box=box))[0].startswith("bad_target: ")
    assert (await call("zoom_in", image="photo.png", boxes=[]))[0].startswith("bad_arguments: boxes")
    assert (await call("zoom_in", box=box))[0].startswith("bad_target: ")
    assert (await client.call_tool("zoom", {})).is_error
    assert (await client.call_tool("zoom_in", {"image": 5})).is_error


@pytest.mark.slow
def test_a_host_on_stdio(root: Path) -> None:
    async def body() -> None:
        command = ["-m", "pixelis.jobs.mcp", "--root", str(root)]
        async with mcp.Client(mcp.StdioServerParameters(command=sys.executable, args=command)) as client:
            await converse(client)

    asyncio.run(body())


@pytest.mark.slow
@pytest.mark.long
def test_a_host_on_http(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pixelis.jobs.mcp", "--root", str(root), "--http", str(port)]
    with subprocess.Popen(command) as server:
        try:
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert server.poll() is None
                time.sleep(0.2)

            async def body() -> None:
                async with mcp.Client(f"http://127.0.0.1:{port}/mcp") as client:
                    await converse(client)

            asyncio.run(body())
        finally:
            server.kill()


def test_a_workspace_forgets_the_oldest_and_opens_no_path_without_a_root(root: Path) -> None:
    workspace = Workspace(ToolboxConfig(), root)
    box = [0, 0, 0.5, 0.5]
    for shade in range(MAX_MEDIA + 1):
        Image.new("RGB", (40, 30), (shade, 0, 0)).save(root / f"{shade}.png")
        assert workspace.call("zoom_in", {"image": f"{shade}.png", "box": box})[0].status == "ok"
    assert len(workspace.media) == MAX_MEDIA
    assert workspace.call("zoom_in", {"image": "obs1", "box": box})[0].code == "bad_target"
    assert workspace.call("zoom_in", {"image": "0.png", "box": box})[0].status == "ok"  # it is read again
    refused, _ = Workspace(ToolboxConfig(), None).call("zoom_in", {"image": str(root / "0.png")})
    assert (refused.code, "--root" in refused.text) == ("bad_target", True)


@pytest.mark.parametrize("words", [["--http", "0.0.0.0:80"], ["--root", "nowhere"], ["toolbox.operation=[]"]])
def test_command_lines_that_cannot_be_served(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pixelis mcp", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "pixelis mcp: " in capfd.readouterr().err
