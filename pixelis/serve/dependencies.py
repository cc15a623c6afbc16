"""FastAPI dependencies: shared state, authentication, rate limit, admission, and bodies read under a cap.

FastAPI would read a declared body before any dependency runs; ``JsonBody`` reads it after those that refuse.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Generic
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Path, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from pixelis.protocol.errors import ID, ApiError, Model, parse_body
from pixelis.serve.keys import Caller, Scope
from pixelis.serve.protocol.files import FORM_SCHEMA
from pixelis.serve.state import ACTOR_TIMEOUT_S, GatewayState

MAX_SMALL_BODY_BYTES = 65_536
"""Cap of bodies without pictures."""

UPLOAD_GRACE_S, MIN_UPLOAD_BYTES_PER_S = 5.0, 10_000
"""Minimum rate of a body after its first seconds."""
MAX_FIELDS = 16
FORM_PIECE_BYTES = 65_536

EntityId = Annotated[str, Path(pattern=ID)]


async def get_state(request: Request) -> GatewayState:
    return request.app.state.gateway


State = Annotated[GatewayState, Depends(get_state)]
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


async def authorise(state: State, request: Request, credentials: Credentials) -> Caller:
    """Raises ApiError 401 if a required key is missing or unknown."""
    caller = state.access.authorise(credentials.credentials if credentials is not None else "")
    request.scope["pixelis.caller"] = caller.label  # for the log
    request.scope["pixelis.key"] = caller.name
    return caller


Sender = Annotated[Caller, Depends(authorise)]


class Scoped:
    """Raises ApiError 403 unless the caller's key has one of these scopes."""

    def __init__(self, *scopes: Scope):
        self.scopes = scopes

    async def __call__(self, caller: Sender) -> None:
        if not caller.scopes.intersection(self.scopes):
            message = f"{caller.label} lacks the scope {' or '.join(self.scopes)}"
            raise ApiError(403, message, "missing_scope")


async def require_writable(state: State) -> None:
    """Raises ApiError 403 if the service is read-only."""
    if state.config.serve.read_only:
        raise ApiError(403, "this service is read-only: it stores and changes nothing", "read_only")


async def require_json(request: Request) -> None:
    """Raises ApiError 415 for other content. Browsers post forms of other sites, but not JSON."""
    _require_type(request, "application/json")


def _require_type(request: Request, expected: str) -> None:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != expected:
        raise ApiError(415, f"the content type must be {expected}", "content_type")


async def require_own_origin(request: Request) -> None:
    """Raises ApiError 403 for a form on a page of another site."""
    origin = request.headers.get("origin")
    try:
        own = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    except ValueError:  # no URL: half of an IPv6 address
        own = False
    if not own:
        raise ApiError(403, "forms of other sites are not accepted", "origin_not_allowed")


async def limit_rate(state: State, request: Request) -> None:
    """Count the request against its client's rate. Raises ApiError 429 above the rate."""
    allowance = state.rates.take(state.access.client_id(request))
    if allowance is None:
        return
    request.scope["pixelis.headers"] = allowance.headers()
    if allowance.retry_after_s is not None:
        message = f"this client has sent more than {allowance.limit} requests: wait before the next one"
        raise ApiError(429, message, "rate_limit_exceeded", retry_after_s=allowance.retry_after_s)


async def require_room(state: State) -> None:
    """Raises Overloaded if another request would be refused after its body has arrived."""
    state.admission.require_room()


async def admit(state: State) -> AsyncIterator[None]:
    """Count the request as inside until its reply or stream has been sent. Raises Overloaded."""
    with state.admission.enter():
        yield


Admitted = Annotated[None, Depends(admit)]
"""After the body in a route's signature: a body that arrives slowly keeps nobody out."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Arrival of a request in monotonic seconds, and its deadline in the event loop's time."""

    started: float
    deadline: float


async def get_timing(state: State) -> Timing:
    return Timing(time.monotonic(), asyncio.get_running_loop().time() + state.config.serve.timeout_s)


RequestTiming = Annotated[Timing, Depends(get_timing)]


class JsonBody(Generic[Model]):
    """The body as ``model``, read under a cap in bytes and seconds; empty counts as ``{}``.

    One with ``pictures`` is capped by ``serve.max_body_bytes`` and the request's deadline, and is not empty.
    Raises ApiError 413, 408, or 400 for a body that is not a ``model``.
    """

    def __init__(self, model: type[Model], pictures: bool = False):
        self.model, self.pictures = model, pictures

    async def __call__(self, state: State, request: Request, timing: RequestTiming) -> Model:
        if self.pictures:
            body = await read_body(state, request, state.config.serve.max_body_bytes, timing.deadline)
            return parse_body(self.model, body)
        deadline = asyncio.get_running_loop().time() + ACTOR_TIMEOUT_S
        body = await read_body(state, request, MAX_SMALL_BODY_BYTES, deadline)
        return parse_body(self.model, body or b"{}")


async def read_upload(state: State, request: Request, timing: RequestTiming) -> FormData:
    """The form of an upload, capped like a question. Raises ApiError 400, 403 (another site) and 415."""
    await require_own_origin(request)
    _require_type(request, "multipart/form-data")
    body = await read_body(state, request, state.config.serve.max_body_bytes, timing.deadline)
    return await read_form(request.headers, body)


async def read_form(headers: Headers, body: bytes) -> FormData:
    """The fields of a form that is in memory. Raises ApiError 400."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), FORM_PIECE_BYTES):
            yield body[start : start + FORM_PIECE_BYTES]
            await asyncio.sleep(0)  # other requests go on

    parser = MultiPartParser(headers, pieces(), max_files=MAX_FIELDS, max_fields=MAX_FIELDS)
    parser.spool_max_size = len(body) + 1  # nothing is written to disk
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise ApiError(400, f"the form is damaged: {error.message}", "invalid_form") from None


async def read_body(state: GatewayState, request: Request, max_bytes: int, deadline: float) -> bytes:
    """The body, read under a cap of bytes, a deadline (event loop's time) and a minimum rate.

    Raises ApiError 413 as soon as it is known to be too large, 408 if late, Overloaded for too many at once.
    """
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", "body_too_large")
    content_length = request.headers.get("content-length", "")
    if content_length.isdigit() and int(content_length) > max_bytes:
        raise too_large
    body = bytearray()
    latest = asyncio.get_running_loop().time() + UPLOAD_GRACE_S
    try:
        # By key, where it has a name: an address may be that of a proxy with many callers.
        client = request.scope.get("pixelis.key") or state.access.client_id(request)
        with state.uploads.enter(client) as receive:
            async with asyncio.timeout_at(min(latest, deadline)) as limit:
                async for chunk in request.stream():
                    if len(body) + len(chunk) > max_bytes:  # chunked bodies announce no length
                        raise too_large
                    receive(len(chunk))
                    body += chunk
                    limit.reschedule(min(latest + len(body) / MIN_UPLOAD_BYTES_PER_S, deadline))
    except TimeoutError:
        message = f"the body is late, or arrives at less than {MIN_UPLOAD_BYTES_PER_S} bytes a second"
        raise ApiError(408, message, "request_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the connection ended before the body did", "client_disconnected") from None
    return bytes(body)


def openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description of ``app``, with the bodies that ``JsonBody`` reads."""
    description = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    schemas = description["components"]["schemas"]
    for route in (route for route in app.routes if isinstance(route, APIRoute)):
        for body in (d.call for d in route.dependant.dependencies if isinstance(d.call, JsonBody)):
            schema = body.model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {}) | {body.model.__name__: schema}
            reference = {"schema": {"$ref": f"#/components/schemas/{body.model.__name__}"}}
            _describe_body(description, route, {"application/json": reference})
        if any(d.call is read_upload for d in route.dependant.dependencies):
            _describe_body(description, route, {"multipart/form-data": {"schema": FORM_SCHEMA}})
    return description


def _describe_body(description: dict[str, Any], route: APIRoute, content: dict[str, Any]) -> None:
    for method in route.methods:
        operation = description["paths"][route.path_format][method.lower()]
        operation["requestBody"] = {"required": True, "content": content}
