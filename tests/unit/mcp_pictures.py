"""A server of the MCP SDK with a state, pictures and faults, for the tests of environments.

usage: python mcp_pictures.py [stdio|PORT]
"""

import io
import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from PIL import Image as Pillow

server = MCPServer("pictures", instructions="Count the squares.")
calls = []


@server.tool()
def square(side: int, color: str = "red") -> list:
    """Draw a square."""
    calls.append(side)
    file = io.BytesIO()
    Pillow.new("RGB", (side, side), color).save(file, "PNG")
    return [f"square {len(calls)}", Image(data=file.getvalue(), format="png")]


@server.tool()
def mean(picture: str) -> str:
    """The mean color of a picture, a data: URL."""
    import base64

    pixel = Pillow.open(io.BytesIO(base64.b64decode(picture.partition(",")[2]))).resize((1, 1))
    return str(pixel.getpixel((0, 0)))


@server.tool()
def fail(how: str) -> str:
    """Fail: raise, exit or hang; or tell the process or the variable `how`."""
    if how == "exit":
        os._exit(3)
    if how == "hang":
        time.sleep(3600)
    if how == "pid":
        return str(os.getpid())
    if how in os.environ:
        return os.environ[how]
    raise ValueError(f"no {how}")


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["stdio"]):
        server.run()
    elif sys.argv[1] == "mute":
        time.sleep(3600)
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
