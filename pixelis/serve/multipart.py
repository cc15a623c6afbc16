"""Parses forms of type ``multipart/form-data`` (RFC 7578) that are in memory."""

from __future__ import annotations

from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from pixelis.serve.protocol.errors import ApiError

MAX_FIELDS = 16


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of a form; ``filename`` is None unless it is a file."""

    name: str
    filename: str | None
    content: bytes

    def text(self) -> str:
        """The content as text. Raises ApiError 400 if it is not UTF-8."""
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            raise ApiError(
                400, f"`{self.name[:100]}` is not text", "invalid_value", self.name[:100]
            ) from None


def read_form(content_type: str, body: bytes) -> dict[str, FormField]:
    """The fields by name. Raises ApiError 415 for another type, 400 for a damaged or large form."""
    kind, options = parse_options_header(content_type[:1000].encode("latin-1", "replace"))
    if kind != b"multipart/form-data":
        raise ApiError(415, "the content type must be multipart/form-data", "content_type")
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= 70:
        raise ApiError(400, "the content type names no boundary", "invalid_form")
    fields, ends = list[FormField](), list[bool]()

    def add(field: FormField) -> None:
        if len(fields) == MAX_FIELDS:
            raise FormParserError(f"it has more than {MAX_FIELDS} fields")
        fields.append(field)

    def add_field(field: Field) -> None:
        add(FormField(_text(field.field_name), None, field.value or b""))

    def add_file(file: File) -> None:
        file.file_object.seek(0)
        add(FormField(_text(file.field_name), _text(file.file_name), file.file_object.read()))

    config = {"MAX_MEMORY_FILE_SIZE": len(body) + 1}
    try:
        parser = FormParser(
            kind.decode(),
            add_field,
            add_file,
            on_end=lambda: ends.append(True),
            boundary=boundary,
            config=config,
        )
        parser.write(body)
    except FormParserError as error:
        raise ApiError(400, f"the form is damaged: {str(error)[:200]}", "invalid_form") from None
    if not ends:
        raise ApiError(400, "the form is damaged: it has no end", "invalid_form")
    return {field.name: field for field in fields}


def _text(name: bytes | None) -> str:
    return (name or b"").decode("utf-8", "replace")
