"""State shared by the routes of a gateway replica, with timeouts on calls to actors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from ray.exceptions import RayError

from pixelis.config import Config
from pixelis.errors import InfraFailure
from pixelis.files import REASONS
from pixelis.protocol.errors import ApiError
from pixelis.serve.access import Access
from pixelis.serve.agent import Agent
from pixelis.serve.cache import ReplyCache
from pixelis.serve.counters import Counters
from pixelis.serve.files import FileStore
from pixelis.serve.limits import (
    Admission,
    ByteBudget,
    RateLimits,
    Uploads,
    admission_limits,
)

T = TypeVar("T")
ACTOR_TIMEOUT_S = 5.0
MEMORY_CHECK_S = 1.0
CACHE_TTL_S = 3600.0
CLIENT_UPLOADS = 32
"""Bodies that one client may be sending at once."""
DECODED_BYTES = 600_000_000
"""Size of the decoded pictures of all requests above which requests wait."""
UPLOADS = 16
"""Bodies of the largest size that may be arriving at once."""
STATUS_TIMEOUT_S = 2.0
"""Timeout of calls that only inform."""


class GatewayState:
    """The agent, the limits, the reply cache and the counters of a replica."""

    def __init__(self, config: Config, agent: Agent, key_digest: bytes | None, replica: str = "0"):
        self.config, self.agent = config, agent
        self.created = int(time.time())
        self.access = Access(config, key_digest)
        self.admission = Admission(*admission_limits(config), live=config.serve.priority)
        self.uploads = Uploads(CLIENT_UPLOADS, UPLOADS * config.serve.max_body_bytes)
        self.pictures = ByteBudget(max(DECODED_BYTES, 3 * config.serve.max_request_pixels))
        self.rates = RateLimits(config.serve.per_minute, config.serve.per_hour)
        self.files = FileStore(config.run.dir, config.serve.files)
        self.cache = ReplyCache(config.serve.cache, CACHE_TTL_S)
        self.counters = Counters(replica, self._values)
        self._health: tuple[float, list[dict[str, Any]]] = (float("-inf"), [])
        self._health_lock = asyncio.Lock()
        self._condition, self._condition_lock = (float("-inf"), "", 0), asyncio.Lock()

    @property
    def evolves(self) -> bool:
        return self.agent.backends.evolution is not None

    async def generator_health(self, since: float) -> list[dict[str, Any]]:
        """Health of the generators that answer, requested at ``since`` (monotonic seconds) or later."""
        async with self._health_lock:
            requested_at, health = self._health
            if requested_at < since:
                requested_at = time.monotonic()
                health = await self.agent.router.health()
                self._health = (requested_at, health)
            return health

    async def memory_condition(self) -> tuple[str, int]:
        """Why the memory stores nothing, as in ``remembered``, or ""; and its damaged experiences."""
        memory = self.agent.memory
        if memory is None or self.config.serve.read_only:
            return "", 0
        async with self._condition_lock:
            if self._condition[0] + MEMORY_CHECK_S < time.monotonic():
                code, count = await memory.condition()
                self._condition = (time.monotonic(), REASONS.get(code, code), count)
            return self._condition[1:]

    async def call_evolution(
        self, method: str, *args: Any, timeout_s: float = ACTOR_TIMEOUT_S, **kwargs: Any
    ) -> Any:
        """Raises ApiError 404 without an Evolution actor, 504 after ``timeout_s``."""
        if not self.evolves:
            raise ApiError(404, "this service does not learn: it runs without evolution", "no_evolution")
        actor = await self.agent.evolution_actor()
        return await self.with_timeout(getattr(actor, method).remote(*args, **kwargs), timeout_s)

    async def read_evolution(self, method: str, default: T, *args: Any) -> T:
        if not self.evolves:
            return default
        try:
            return await self.call_evolution(method, *args, timeout_s=STATUS_TIMEOUT_S)
        except (RayError, InfraFailure, ApiError):
            return default

    async def with_timeout(self, answer: Awaitable[T], timeout_s: float = ACTOR_TIMEOUT_S) -> T:
        """Raises ApiError 504 after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            message = f"an actor did not answer within {timeout_s:g} s"
            raise ApiError(504, message, "timeout", retry_after_s=1.0) from None

    def _values(self) -> dict[str, float]:
        version = {} if self.agent.version is None else {"policy_version": float(self.agent.version)}
        return {
            "inside": self.admission.inside,
            "shed": self.admission.shed,
            "decoded_bytes": self.pictures.used,
            "rate_limited": self.rates.refused,
            "cache_hits": self.cache.hits,
            "cache_entries": len(self.cache.replies),
            "cache_bytes": self.cache.bytes,
            **version,
            **{f"agent_{name}": float(count) for name, count in self.agent.counts.items()},
        }
