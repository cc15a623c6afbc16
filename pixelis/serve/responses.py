"""HTTP responses: failures as OpenAI errors without internals, and server-sent events with a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from ray.exceptions import RayError, RayTaskError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from pixelis.actors.generator_member import root_cause
from pixelis.errors import BadInput, InfraFailure, Overloaded, PixelisError
from pixelis.protocol.errors import ApiError, validation_error

log = logging.getLogger(__name__)
T = TypeVar("T")

LAST_S = 10.0
"""Seconds after its deadline in which a stream's last events must have been read."""
STATUS = {
    **dict.fromkeys(("not_found", "file_not_found", "unknown_experience"), 404),
    **dict.fromkeys(("unknown_review", "unknown_version", "no_evolution"), 404),
    **dict.fromkeys(("already_decided", "serves_already", "no_way_back", "no_version", "feedback_full"), 409),
    "response_format_failed": 422,
}
"""Status of a BadInput by its code, others 400."""


def add_exception_handlers(app: FastAPI) -> None:
    """Answer every failure with an OpenAI error. ``Shield`` answers unexpected exceptions."""
    for kind in (ApiError, PixelisError, RayError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _error_response)


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        return validation_error(error.errors()).response()
    if not isinstance(error, HTTPException):
        return api_error(error).response()
    reasons = {404: "no such route", 405: "this route does not accept the method"}  # of the router
    reason = reasons.get(error.status_code, "the request was refused")
    message = f"{reason}: {request.method} {request.url.path[:200]}"
    code = "not_found" if error.status_code == 404 else "bad_request"
    return ApiError(error.status_code, message, code, extra_headers=dict(error.headers or {})).response()


def api_error(error: BaseException) -> ApiError:
    """The failure as the caller may see it; those of the service are logged."""
    known = ApiError | BadInput | InfraFailure
    if isinstance(error, RayTaskError) and isinstance(cause := root_cause(error), known):
        return api_error(cause)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadInput):
        fix = f" ({error.fix})" if error.fix else ""
        place = f"`{error.place}`: " if error.place else ""
        param = error.place or ("image" if error.code.startswith("image") else None)
        message = f"{place}{error.message}{fix}"
        return ApiError(STATUS.get(error.code, 400), message, error.code, param)
    if isinstance(error, Overloaded):
        return ApiError(429, error.message, error.code, retry_after_s=error.retry_after_s)
    if isinstance(error, InfraFailure | RayError) and not isinstance(error, RayTaskError):
        log.warning("request failed: %s", error)
        return ApiError(503, "the service cannot answer at the moment", "unavailable", retry_after_s=2.0)
    log.error("request failed", exc_info=error)
    return ApiError(500, "internal error", "internal_error")


class EventStream(StreamingResponse):
    """Server-sent events, until LAST_S seconds after ``deadline`` (event loop's time).

    Then ``events`` is closed, and ``resources``, which a generator that never began would not release.
    """

    def __init__(
        self, events: AsyncGenerator[str, None], deadline: float, resources: AsyncExitStack | None = None
    ):
        # Proxies would otherwise collect events until a buffer is full.
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self.events, self.deadline, self.resources = events, deadline, resources or AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.resources, aclosing(self.events):
            # A caller that stops reading would hold the stream and its slot.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self.deadline + LAST_S):
                    await super().__call__(scope, receive, send)


async def until(deadline: float, source: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The items of ``source``. Raises TimeoutError at ``deadline`` (event loop's time).

    The timeout applies while an item is awaited: around the whole generator it could cancel its consumer.
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
