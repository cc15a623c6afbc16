"""The error body of every route, in OpenAI's format, and the validation of bodies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse

MAX_NAME_CHARS = 256
"""Longest name of a user or reviewer."""
MAX_ANSWER_CHARS = 1000
MAX_COMMENT_CHARS = 4000
ID = r"^[A-Za-z0-9_-]{1,80}$"
"""Ids of experiences and reviews."""
_TYPES = {401: "authentication_error", 403: "permission_error"}
_TYPES |= {404: "not_found_error", 429: "rate_limit_error"}

Model = TypeVar("Model", bound=BaseModel)


class ErrorDetail(BaseModel):
    """An error in OpenAI's format; ``param`` names the part of the body."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorResponse(BaseModel):
    """Body of every reply with a status of 400 or above."""

    error: ErrorDetail


@dataclass(eq=False)
class ApiError(Exception):
    """A failed request: HTTP status and the fields of an OpenAI error. Never carries internals."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: float | None = None
    extra_headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "code": self.code, "param": self.param}}

    def headers(self) -> dict[str, str]:
        headers = dict(self.extra_headers)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers())


def invalid(param: str, problem: str, code: str = "invalid_value") -> ApiError:
    """ApiError 400 for the part ``param`` of a body."""
    return ApiError(400, f"`{param}`: {problem}", code, param)


class StrictModel(BaseModel):
    """A request body without type coercion or unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, body: Any) -> Any:
        """Keep one unknown field: pydantic makes an error of each, and a body has room for a million."""
        if not isinstance(body, dict):
            return body
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in body if name not in known), None)
        return {name: value for name, value in body.items() if name in known or name == unknown}


def is_plain(text: str) -> bool:
    return not any(c == "\x00" or "\ud800" <= c <= "\udfff" for c in text)


def _plain_text(text: str) -> str:
    if not is_plain(text):
        raise PydanticCustomError("invalid_characters", "contains a NUL or an unpaired surrogate")
    return text


PlainText = Annotated[str, AfterValidator(_plain_text)]
"""Text that may be stored: without NUL and unpaired surrogates."""


def text_or(other: Any) -> Any:
    """The type of a string or an ``other`` JSON value; errors are of the one that the value looks like."""
    kinds = Annotated[str, Tag("a string")] | Annotated[other, Tag("no string")]
    return Annotated[
        kinds, Discriminator(lambda value: "a string" if isinstance(value, str) else "no string")
    ]


def parse_body(model: type[Model], body: bytes) -> Model:
    """Raises ApiError 400 that names the first wrong field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        # Without the input: it may be megabytes of picture, and an error must not echo it.
        problems = error.errors(include_input=False, include_url=False, include_context=False)
        raise validation_error(problems) from None


def validation_error(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's ``errors`` as ApiError 400, or 404 for a path parameter."""
    first = errors[0]
    loc = first["loc"]  # FastAPI puts the source (path, query) before it
    if loc[:1] == ("path",):
        return ApiError(404, f"no such {loc[1]}", "not_found", loc[1])
    param = ""  # messages[0].role
    for item in loc[1:] if loc[:1] == ("query",) else loc:
        if isinstance(item, int):
            param += f"[{item}]"
        elif item.isidentifier():  # the names of union branches, which pydantic adds, are none
            param += f".{item}" if param else item
    param = param[:100]  # a key of the caller may be as long as the body
    if first["type"] == "json_invalid":
        reason = first["msg"].removeprefix("Invalid JSON: ")
        return ApiError(400, f"the body is not valid JSON: {reason}", "invalid_json")
    message = f"`{param}`: {first['msg']}" if param else first["msg"]
    codes = {"missing": "missing_parameter", "invalid_characters": "invalid_characters"}
    return ApiError(400, message, codes.get(first["type"], "invalid_value"), param or None)
