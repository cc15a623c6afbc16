"""Shared parts of the experience and evolution routes: checked orders, calls to actors with a timeout."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import Request
from ray.exceptions import RayError
from starlette.requests import ClientDisconnect

from pixelis.config import Config
from pixelis.errors import InfraFailure
from pixelis.serve.access import Access
from pixelis.serve.agent import Agent
from pixelis.serve.cache import ReplyCache
from pixelis.serve.limits import RateLimits
from pixelis.serve.schemas import ID, ApiError

T = TypeVar("T")
LOOK_S = 5.0
"""Seconds that an actor has to say or note something."""
MAX_ORDER_BYTES = 65_536


class Dependencies:
    """The agent and its surroundings as the routes need them."""

    def __init__(self, config: Config, agent: Agent, access: Access, cache: ReplyCache, rates: RateLimits):
        self.config, self.agent, self.access, self.cache, self.rates = config, agent, access, cache, rates

    @property
    def evolves(self) -> bool:
        """Whether there is an Evolution actor."""
        return self.agent.backends.evolution is not None

    async def order(self, request: Request) -> bytes:
        """The body of a posted order, after key, read-only mode and content type; ``{}`` for an empty one."""
        self.access.authorise(request)
        self.access.writing()
        self.access.json_only(request)
        try:
            async with asyncio.timeout(LOOK_S):
                return await read_body(request, MAX_ORDER_BYTES) or b"{}"
        except TimeoutError:
            raise ApiError(408, f"the request's body did not arrive in {LOOK_S:g} s", "request_timeout") from None

    def limited(self, request: Request) -> None:
        """Count the request against its client's limits. Raises ApiError 429 beyond; the headers say what is left."""
        allowance = self.rates.take(self.access.client(request))
        if allowance is None:
            return
        request.scope["pixelis.headers"] = allowance.headers()
        if allowance.retry_after_s is not None:
            message = f"more than {allowance.limit} requests: this client has had its share for now"
            raise ApiError(429, message, "rate_limit_exceeded", retry_after_s=allowance.retry_after_s)

    def named(self, request: Request) -> str:
        """The id in the path. Raises ApiError 404 for what cannot be one."""
        name = request.path_params["id"]
        if not re.fullmatch(ID, name):
            raise ApiError(404, "no such id", "not_found", "id")
        return name

    async def tell(self, method: str, *arguments: Any, limit_s: float = LOOK_S, **named: Any) -> Any:
        """Call a method of the Evolution actor. Raises ApiError 404 when there is none, 504 after ``limit_s``."""
        if not self.evolves:
            raise ApiError(404, "this service does not learn: it has no evolution", "no_evolution")
        actor = await self.agent.evolution_actor()
        return await self.within(getattr(actor, method).remote(*arguments, **named), limit_s)

    async def within(self, answer: Awaitable[T], limit_s: float = LOOK_S) -> T:
        """The awaited value. Raises ApiError 504 after ``limit_s``."""
        try:
            return await asyncio.wait_for(_value(answer), limit_s)
        except TimeoutError:
            raise ApiError(504, f"no answer from behind within {limit_s:g} s", "timeout", retry_after_s=1.0) from None

    async def look(self, method: str, empty: T, *arguments: Any) -> T:
        """As ``tell``, for a page that shows what there is: ``empty`` without an Evolution actor or an answer from it."""
        if not self.evolves:
            return empty
        try:
            return await self.tell(method, *arguments, limit_s=2.0)
        except (RayError, InfraFailure, ApiError):
            return empty


async def read_body(request: Request, cap: int) -> bytes:
    """The body, refused as soon as it is known or seen to pass the cap (chunked bodies announce no length)."""
    too_large = ApiError(413, f"the body is larger than {cap} bytes", "body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > cap:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            if len(body) + len(chunk) > cap:
                raise too_large
            body += chunk
    except ClientDisconnect:
        raise ApiError(400, "the connection ended before the body did", "client_disconnected") from None
    return bytes(body)


async def _value(answer: Awaitable[T]) -> T:
    return await answer
