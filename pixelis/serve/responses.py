"""HTTP responses: failures as OpenAI-shaped errors without internals, streams as server-sent events with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from ray.exceptions import RayError, RayTaskError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from pixelis.errors import BadInput, InfraFailure, Overloaded
from pixelis.serve.schemas import ApiError

log = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

NOT_FOUND = ("not_found", "unknown_experience", "unknown_review", "unknown_version", "no_evolution")
CONFLICT = ("already_decided", "serves_already", "no_way_back", "no_version")


def guarded(route: str, handler: Handler) -> Handler:
    """The handler with every failure turned into an error reply; ``route`` is its name among the counters."""

    async def guard(request: Request) -> Response:
        request.scope["pixelis.route"] = route
        try:
            return await handler(request)
        except Exception as error:
            return api_error(error).response()

    return guard


def api_error(error: BaseException) -> ApiError:
    """The failure as the caller may see it. What is not the caller's fault is logged here and named in general words."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RayTaskError):
        inner = cause_of(error)
        if isinstance(inner, BadInput | InfraFailure):
            return api_error(inner)
    if isinstance(error, BadInput):
        fix = f" ({error.fix})" if error.fix else ""
        status = 404 if error.code in NOT_FOUND else 409 if error.code in CONFLICT else 400
        return ApiError(status, f"{error.message}{fix}", error.code, "image" if error.code.startswith("image") else None)
    if isinstance(error, Overloaded):
        return ApiError(429, error.message, error.code, retry_after_s=error.retry_after_s)
    if isinstance(error, InfraFailure | RayError) and not isinstance(error, RayTaskError):
        log.warning("request failed: %s", error)
        return ApiError(503, "the service cannot answer at the moment", "unavailable", retry_after_s=2.0)
    log.error("request failed", exc_info=error)
    return ApiError(500, "internal error", "internal_error")


async def http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router in the shape of all other errors."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = {404: "no such route", 405: "this route does not take that method"}.get(status, "the request was refused")
    code = "not_found" if status == 404 else "bad_request"
    headers = dict(getattr(error, "headers", None) or {})
    return ApiError(status, f"{detail}: {request.method} {request.url.path[:200]}", code, extra=headers).response()


def cause_of(error: BaseException) -> BaseException:
    """What was raised at the bottom of an actor that called an actor."""
    while isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
        error = error.cause
    return error


class EventStream(StreamingResponse):
    """Server-sent events. However the stream ends, by its last event or the caller leaving, its work ends; ``held`` is let go."""

    def __init__(self, events: AsyncGenerator[str, None], held: contextlib.ExitStack):
        # Proxies would otherwise collect events until a buffer is full.
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self.events, self.held = events, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.held.close()
            await self.events.aclose()


async def until(deadline: float, source: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The items of ``source``, closed at the end; raises TimeoutError at ``deadline`` (time of the event loop).

    The clock runs while an item is waited for, never between: a timeout around a whole generator would strike whoever happens
    to hold the item.
    """
    try:
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    item = await anext(source)
            except StopAsyncIteration:
                return
            yield item
    finally:
        if isinstance(source, AsyncGenerator):
            await source.aclose()


def event(data: dict[str, Any], name: str | None = None) -> str:
    """One server-sent event of JSON data."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
