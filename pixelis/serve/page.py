"""Serves the web page: ``/`` and its files under ``/page/``, read once from the package.

Nothing here needs a key: the files are public, and what they ask for goes through the routes that check it.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from pixelis.config import Config
from pixelis.serve.shapes import model_name

TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "jpg": "image/jpeg",
    "json": "application/json",
}
EXAMPLE = "cards:?split=test&seed=7&index=5"
"""The picture of ``example.jpg``, in the world of pixelis-nano. Its ground is scikit-image's rocket (SpaceX, CC0)."""
HEADERS = {
    # No script, style or connection but our own: an answer that smuggled markup into the page could still load or send nothing.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_routes(app: FastAPI, config: Config, needs_key: bool) -> None:
    """Add ``GET /``, ``/page/NAME`` and ``/page/settings.json`` (what the page must know of this service) to ``app``.

    ``needs_key``: requests must bring an API key. A name that is no file of the page is left to the router's 404.
    """
    files = page_files()
    files["settings.json"] = json.dumps(settings(config, needs_key)).encode()
    app.add_route("/", _file("index.html", files["index.html"]), methods=["GET", "HEAD"])
    for name, content in files.items():
        app.add_route(f"/page/{name}", _file(name, content), methods=["GET", "HEAD"])


def page_files() -> dict[str, bytes]:
    """The page's files by name: only these are ever served, whatever a path says."""
    folder = importlib.resources.files("pixelis.serve") / "page"
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.name.rpartition(".")[2] in TYPES}


def settings(config: Config, needs_key: bool) -> dict[str, Any]:
    """Limits that the page keeps to before it sends anything, and whether it must ask for a key."""
    return {
        "model": model_name(config),
        "needs_key": needs_key,
        "read_only": config.serve.read_only,
        "samples": config.serve.samples,
        # As base64 in a body, so that one limit tells the page when to make a picture smaller.
        "max_body_bytes": min(config.serve.max_body_bytes, config.toolbox.max_image_bytes * 4 // 3),
        "max_question_chars": config.serve.max_question_chars,
        "max_image_pixels": config.toolbox.max_image_pixels,
        "operations": bool(config.toolbox.operations),
        "evolution": config.evolution.enabled,
        "example": ["example.jpg", "Which digit is in the red frame?"],
    }


def _file(name: str, content: bytes) -> Callable[[Request], Awaitable[Response]]:
    kind = TYPES[name.rpartition(".")[2]]
    headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    async def send(request: Request) -> Response:
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if headers["ETag"] in known:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)  # Starlette adds the charset to text

    return send
