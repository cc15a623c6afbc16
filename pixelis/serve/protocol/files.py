"""OpenAI's files: bodies of ``/v1/files``, and how questions name a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from pixelis.errors import BadInput
from pixelis.operations.encoded import decode_base64, media_type
from pixelis.serve.files import StoredFile
from pixelis.serve.protocol.errors import ApiError

MAX_FILENAME_CHARS = 255
MIN_TTL_S = 3600
"""Shortest ``expires_after``, as OpenAI has it."""


Kind = Literal["image", "video"]


class FileObject(StoredFile):
    """A file as OpenAI describes it, and the ``media_type`` that its first bytes tell."""

    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: StoredFile) -> FileObject:
        return cls(**file.model_dump())


class FileList(BaseModel):
    """Reply of ``GET /v1/files``."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """Reply of ``DELETE /v1/files/{id}``."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def file_url(files: Mapping[str, str], id: str, kind: Kind | None, param: str) -> str:
    """The data URL of a file. Raises ApiError 400 if missing or of another kind."""
    url = files.get(id)
    if url is None:
        raise ApiError(400, f"no file {id[:80]!r} is stored", "file_not_found", param)
    if kind is not None and not url.startswith((f"data:{kind}/", "data:image/gif")):
        noun = "picture" if kind == "image" else "clip"
        raise ApiError(400, f"`{param}`: the file {id} is no {noun}", "file_type", param)
    return url


def typed_data_url(data: str, param: str) -> str:
    """The data URL of base64 data or of a data URL, typed by its first bytes."""
    body = data.partition(",")[2] if data[:5].lower() == "data:" else data
    try:
        return f"data:{media_type(decode_base64(body))};base64,{body}"
    except ValueError:
        raise ApiError(400, f"`{param}`: the file's data is not base64", "file_encoding", param) from None
    except BadInput as error:
        raise ApiError(400, f"`{param}`: {error.message}", error.code, param) from None


FORM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["vision", "user_data"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_TTL_S},
    },
}
"""The form of an upload."""
