"""``/v1/files``: pictures and clips that are uploaded once and asked about often."""

from __future__ import annotations

import asyncio
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from starlette.datastructures import FormData, UploadFile

from pixelis.errors import InfraFailure
from pixelis.files import REASONS
from pixelis.operations.encoded import media_type
from pixelis.operations.image import image_pixels
from pixelis.operations.video import clip_pixels
from pixelis.protocol.errors import ApiError
from pixelis.serve.dependencies import (
    EntityId,
    Scoped,
    Sender,
    State,
    limit_rate,
    read_upload,
    require_room,
    require_writable,
)
from pixelis.serve.files import Purpose
from pixelis.serve.protocol.files import MAX_FILENAME_CHARS, MIN_TTL_S, FileDeleted, FileList, FileObject
from pixelis.serve.state import GatewayState

MAX_PAGE_SIZE = 10_000
UPLOAD_CHECKS = [Depends(require_writable), Depends(require_room), Depends(limit_rate)]
BINARY: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}

router = APIRouter(tags=["files"], dependencies=[Depends(Scoped("ask"))])


@router.post("/v1/files", dependencies=UPLOAD_CHECKS)
async def create_file(
    state: State, caller: Sender, form: Annotated[FormData, Depends(read_upload)]
) -> FileObject:
    """Store a picture or clip. Questions name it by its `id` until it expires."""
    unknown = set(form).difference(("file", "purpose", "expires_after[anchor]", "expires_after[seconds]"))
    if unknown:
        name = min(unknown)[:100]
        raise ApiError(400, f"`{name}` is not supported: leave it out", "unsupported_parameter", name)
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise ApiError(400, "the form needs a `file`", "missing_parameter", "file")
    purpose = form.get("purpose")
    if purpose not in ("vision", "user_data"):
        raise ApiError(400, "`purpose` must be `vision` or `user_data`", "invalid_value", "purpose")
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    ttl_s = None
    if anchor is not None or seconds is not None:
        digits = re.fullmatch(r"[0-9]{1,10}", str(seconds))
        if anchor != "created_at" or digits is None or int(digits[0]) < MIN_TTL_S:
            message = f"`expires_after` needs the anchor `created_at` and at least {MIN_TTL_S} seconds"
            raise ApiError(400, message, "invalid_value", "expires_after")
        ttl_s = float(digits[0])
    name = PurePosixPath((upload.filename or "").replace("\\", "/")).name
    name = "".join(c for c in name if c.isprintable())[:MAX_FILENAME_CHARS] or "file"
    content = await upload.read()
    await asyncio.to_thread(_check_media, state, content)
    try:
        file = await asyncio.to_thread(
            state.files.add, caller.name, content, name, cast(Purpose, purpose), ttl_s
        )
    except InfraFailure as error:
        message = f"the disk of the service stores no file: {REASONS.get(error.code, 'I/O error')}"
        raise ApiError(507, message, error.code, retry_after_s=60.0) from None
    return FileObject.of(file)


@router.get("/v1/files")
async def list_files(
    state: State,
    caller: Sender,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE)] = MAX_PAGE_SIZE,
    after: str = "",
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> FileList:
    """List the key's files, by default the newest first; `after` is the last id of the previous page."""
    files = await asyncio.to_thread(state.files.list, caller.name)
    files = [file for file in (files if order == "asc" else files[::-1]) if purpose in (None, file.purpose)]
    start = next((place + 1 for place, file in enumerate(files) if file.id == after), 0)
    page = [FileObject.of(file) for file in files[start : start + limit]]
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return FileList(data=page, first_id=ends[0], last_id=ends[1], has_more=start + limit < len(files))


@router.get("/v1/files/{id}")
async def get_file(state: State, caller: Sender, id: EntityId) -> FileObject:
    """Describe a file."""
    return FileObject.of(await asyncio.to_thread(state.files.get, caller.name, id))


@router.get("/v1/files/{id}/content", response_class=Response, responses=BINARY)
async def get_file_content(state: State, caller: Sender, id: EntityId) -> Response:
    """Download a file."""
    _, content = await asyncio.to_thread(state.files.read, caller.name, id)
    headers = {"Content-Disposition": "attachment"}  # shown by a browser it would have the service's origin
    return Response(content, media_type="application/octet-stream", headers=headers)


@router.delete("/v1/files/{id}", dependencies=[Depends(require_writable)])
async def delete_file(state: State, caller: Sender, id: EntityId) -> FileDeleted:
    """Delete a file. Experiences of questions about it remain."""
    await asyncio.to_thread(state.files.delete, caller.name, id)
    return FileDeleted(id=id)


def _check_media(state: GatewayState, content: bytes) -> None:
    """Raises BadInput for content that no question could use; reads headers alone."""
    caps = state.agent.clip_caps
    if media_type(content).startswith("video/"):
        clip_pixels(content, caps)
    else:
        image_pixels(content, caps.max_image_bytes, caps.max_image_pixels)
