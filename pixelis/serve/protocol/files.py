"""OpenAI's files: bodies of ``/v1/files``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from pixelis.serve.files import StoredFile

MAX_FILENAME_CHARS = 255
MIN_TTL_S = 3600
"""Shortest ``expires_after``, as OpenAI has it."""


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
