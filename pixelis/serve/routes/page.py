"""The web page at ``/`` and the API's documentation at ``/docs``, which need no key."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from pixelis.config import Config
from pixelis.serve.protocol.conversation import MAX_EXCHANGES
from pixelis.serve.protocol.question import model_name

MEDIA_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "jpg": "image/jpeg",
    "mp4": "video/mp4",
    "json": "application/json",
}
DIGITS = {
    "example.jpg": "Which digit is in the red frame?",
    "example-coffee.jpg": "Which digit is in the cyan frame?",
    "example-retina.jpg": "Which digit is in the purple frame?",
}
"""Pictures 5, 31 and 6 of cards:?split=test&seed=7. The backgrounds are scikit-image's rocket (SpaceX), coffee
(Rachel Michetti) and retina (Mikael Häggström), all CC0."""
SIX_OPERATIONS = {
    "example.jpg": "Which digit is in the red frame?",
    "example-words.jpg": "What is written in the upper left?",
    "example-things.jpg": "What colour is the object at [600, 860]?",
    "example-clip.mp4": "Which digit is in the red frame at second 4?",
}
"""Media of the test split of packaged:text, packaged:photos and packaged:digits?clip=yes, over the same photographs."""
ABOUT_NANO = (
    "reads handwritten digits on small cards with coloured frames, hidden in photographs like the examples.",
    "It was trained for nothing else: it cannot describe pictures, read words or chat, and elsewhere it only "
    "guesses.",
)
ABOUT_MINI = (
    "reads the text in a quarter of a picture and digits on small cards with coloured frames, also at a second of a clip; "
    "tells the colour, size, share and corners of a thing that you point at, and where a thing in the first frame of a clip "
    "goes.",
    "It was trained for nothing else, and gets every fifth digit at a second of a clip wrong; it cannot describe pictures "
    "or chat.",
)
ABOUT_OTHERS = (
    "answers questions about a picture: what is there, where, how many, and which words are written on it.",
    "It cannot look anything up outside the picture, and it can be wrong: check answers that matter.",
)
"""A sentence each about what the model, named before it, can and cannot do."""
SWAGGER_FILES = ("swagger-ui.css", "swagger-ui-bundle.js")
HEADERS = {
    # Markup smuggled in by an answer can neither load nor send anything.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, config: Config, needs_key: bool) -> None:
    """Add ``/``, ``/docs`` and ``/page/NAME`` to ``app``."""
    files = page_files()
    files["settings.json"] = json.dumps(page_settings(config, needs_key)).encode()
    paths = {"/": "index.html", "/docs": "docs.html", **{f"/page/{name}": name for name in files}}
    for path, name in paths.items():
        handler = _file_handler(name, files[name])
        app.add_route(path, handler, methods=["GET", "HEAD"], include_in_schema=False)


def page_files() -> dict[str, bytes]:
    """The served files by name: the page's own and Swagger UI's."""
    folder = importlib.resources.files("pixelis.serve") / "page"
    swagger = importlib.resources.files("fastapi_swagger.resources")
    items = [item for item in folder.iterdir() if item.name.rpartition(".")[2] in MEDIA_TYPES]
    return {item.name: item.read_bytes() for item in [*items, *(swagger / name for name in SWAGGER_FILES)]}


def page_settings(config: Config, needs_key: bool) -> dict[str, Any]:
    """What the page needs to know before it sends anything."""
    examples = SIX_OPERATIONS if config.policy.model == "mini" else DIGITS
    return {
        "model": model_name(config),
        "needs_key": needs_key,
        "read_only": config.serve.read_only,
        "samples": config.serve.samples,
        # As base64 in a body, so that one limit tells the page when to shrink a picture.
        "max_body_bytes": min(config.serve.max_body_bytes, config.toolbox.max_image_bytes * 4 // 3),
        "max_video_bytes": min(config.serve.max_body_bytes * 3 // 4, config.toolbox.max_video_bytes),
        "max_video_seconds": config.serve.max_video_seconds,
        "max_question_chars": config.serve.max_question_chars,
        "max_exchanges": MAX_EXCHANGES,
        "max_image_pixels": config.toolbox.max_image_pixels,
        "operations": config.toolbox.operations,
        "evolution": config.evolution.enabled,
        "memory": config.memory.enabled,
        "about": {"nano": ABOUT_NANO, "mini": ABOUT_MINI}.get(config.policy.model, ABOUT_OTHERS),
        "points": config.policy.model == "mini",
        "examples": [{"file": file, "question": question} for file, question in examples.items()],
    }


def _file_handler(name: str, content: bytes) -> Callable[[Request], Awaitable[Response]]:
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]
    headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    async def send(request: Request) -> Response:
        etags = [
            tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")
        ]
        if headers["ETag"] in etags:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)  # Starlette adds the charset to text

    return send
