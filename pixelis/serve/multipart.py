"""Reads forms of type ``multipart/form-data`` (RFC 7578) that are in memory already, under a cap of their body."""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message

from pixelis.serve.protocol.errors import ApiError

MAX_FIELDS = 16
MAX_HEAD_BYTES = 8192


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of a form; ``filename`` is None for one that is no file."""

    name: str
    filename: str | None
    content: bytes

    def text(self) -> str:
        """The content as text. Raises ApiError 400 if it is none."""
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            raise ApiError(400, f"`{self.name[:100]}` is not text", "invalid_value", self.name[:100]) from None


def read_form(content_type: str, body: bytes) -> dict[str, FormField]:
    """The fields by name. Raises ApiError 415 for another content type, 400 for a damaged form or too many fields."""
    boundary = _boundary(content_type)
    # The preamble before the first delimiter is ignored, as is what follows the last one.
    delimiter, body = b"\r\n--" + boundary, b"\r\n" + body
    place, fields = body.find(delimiter), dict[str, FormField]()
    while place >= 0:
        start = place + len(delimiter)
        if body.startswith(b"--", start):
            return fields
        end = body.find(delimiter, start)
        if not body.startswith(b"\r\n", start) or end < 0:
            break
        field = _field(body, start, end)
        fields[field.name] = field
        if len(fields) > MAX_FIELDS:
            raise ApiError(400, f"the form has more than {MAX_FIELDS} fields", "invalid_form")
        place = end
    raise ApiError(400, "the form is damaged: a part has no end", "invalid_form")


def _boundary(content_type: str) -> bytes:
    message = Message()
    message["content-type"] = content_type[:1000]
    if message.get_content_type() != "multipart/form-data":
        raise ApiError(415, "the content type must be multipart/form-data", "content_type")
    boundary = message.get_boundary()
    if not boundary or len(boundary) > 70 or not boundary.isascii():
        raise ApiError(400, "the content type names no boundary", "invalid_form")
    return boundary.encode()


def _field(body: bytes, start: int, end: int) -> FormField:
    """The part between two delimiters; ``start`` is at the line break after the first."""
    head_end = body.find(b"\r\n\r\n", start, min(end, start + MAX_HEAD_BYTES))
    if head_end < 0:
        raise ApiError(400, "the form is damaged: a part has no headers", "invalid_form")
    headers = Message()
    for line in body[start:head_end].decode("utf-8", "replace").split("\r\n"):
        header, _, value = line.partition(":")
        if header.strip().lower() == "content-disposition":
            headers["content-disposition"] = value.strip()
    name = headers.get_param("name", header="content-disposition")
    if not isinstance(name, str) or not name:
        raise ApiError(400, "the form is damaged: a part has no name", "invalid_form")
    return FormField(name, headers.get_filename(), body[head_end + 4 : end])
