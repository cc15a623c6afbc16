"""An MCP server with a tool that returns a picture, of the MCP SDK: Pixelis starts it for each episode."""

import base64
import io

from mcp.server.mcpserver import Image, MCPServer
from PIL import Image as Pictures

server = MCPServer("magnifier", instructions="Magnify what is too small to read.")


@server.tool()
def magnify(picture: str, bbox: list[int]) -> Image:
    """Show a region at twice its size; picture: an id such as img0; bbox: left, top, right, bottom in pixels."""
    whole = Pictures.open(io.BytesIO(base64.b64decode(picture.partition(",")[2])))
    left, top, right, bottom = bbox
    region = whole.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
    file = io.BytesIO()
    region.resize((2 * region.width, 2 * region.height)).save(file, "PNG")
    return Image(data=file.getvalue(), format="png")


if __name__ == "__main__":
    server.run()
