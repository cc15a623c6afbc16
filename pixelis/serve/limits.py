"""Limits of a replica: a bounded queue, and request windows for each client."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from pixelis.config import Config
from pixelis.errors import Overloaded

MAX_RETRY_AFTER_S = 60.0
BURST, BURST_S = 4, 10.0
"""Without `serve.max_queue`, this many times as many requests may wait in the first seconds of an overload,
so that a gateway that died costs callers time, but no refusal.
"""
AGE_S = 1.0
"""Each unit of priority equals this many seconds of waiting."""
MAX_CLIENTS = 10_000
"""Clients tracked at once; the one idle for longest is dropped first."""


def running_limit(config: Config, generators: int | None = None, replicas: int | None = None) -> int:
    """Requests of a replica that the generators can decode at once."""
    requests = (generators or config.engine.workers) * config.engine.max_num_seqs // config.serve.samples
    return max(1, -(-requests // (replicas or config.serve.replicas or 1)))


def admission_limits(
    config: Config, generators: int | None = None, replicas: int | None = None
) -> tuple[int, int, int]:
    """Requests that run, that may wait, and that may wait in the first seconds of an overload."""
    running, most = running_limit(config, generators, replicas), config.serve.max_queue
    return running, most or running, most or BURST * running


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that waits for a slot; the lowest ``rank`` is next."""

    priority: int
    rank: float
    ready: asyncio.Future[None]


class Admission:
    """A bounded queue: ``running`` requests are processed, ``waiting`` may wait, more are refused at once.

    In the first BURST_S seconds of an overload, which ends when nobody waits, ``burst`` may wait. Lower
    priorities go first; each unit equals AGE_S seconds of waiting. If places are short, requests with a
    priority above ``live`` make room, except the next one.
    """

    def __init__(
        self,
        running: int,
        waiting: int,
        burst: int = 0,
        clock: Callable[[], float] = time.monotonic,
        live: int = 0,
    ):
        self.running, self.waiting, self.burst = running, waiting, max(burst, waiting)
        self.live, self.clock = live, clock
        self.free, self.queue = running, list[Waiter]()
        self.inside = 0
        self.overloaded_since: float | None = None
        self.shed = 0
        self.mean_s = 1.0

    def require_room(self) -> None:
        """Raises Overloaded if no further request may enter."""
        if self.inside < self.running + self.waiting:
            return
        now = self.clock()
        if self.overloaded_since is None:
            self.overloaded_since = now
        places = self.burst if now - self.overloaded_since < BURST_S else self.waiting
        if self.inside - len(self._displaceable(self._rank(self.live))) >= self.running + places:
            raise self._refuse()

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Raises Overloaded."""
        self.require_room()
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            if self.inside <= self.running:
                self.overloaded_since = None

    def resize(self, running: int, waiting: int, burst: int = 0) -> None:
        """A lower limit takes effect as running requests end."""
        self.free += running - self.running
        self.running, self.waiting, self.burst = running, waiting, max(burst, waiting)
        self._admit()

    @contextlib.asynccontextmanager
    async def slot(self, priority: int) -> AsyncIterator[None]:
        """Hold a slot. Raises Overloaded if displaced."""
        waiter = Waiter(priority, self._rank(priority), asyncio.get_running_loop().create_future())
        # Their tasks have not noticed yet
        self.queue = [other for other in self.queue if not other.ready.cancelled()]
        if self.free <= 0 and len(self.queue) >= self.burst:
            displaceable = self._displaceable(waiter.rank)
            if not displaceable:
                raise self._refuse()
            self.queue.remove(displaceable[-1])
            displaceable[-1].ready.set_exception(self._refuse())
        self.queue.append(waiter)
        self._admit()
        try:
            await waiter.ready
        except asyncio.CancelledError:
            if waiter in self.queue:
                self.queue.remove(waiter)
            elif not waiter.ready.cancelled() and waiter.ready.exception() is None:  # admitted meanwhile
                self.free += 1
                self._admit()
            raise
        started = time.monotonic()
        try:
            yield
            self.mean_s += 0.1 * (time.monotonic() - started - self.mean_s)
        finally:
            self.free += 1
            self._admit()

    def _admit(self) -> None:
        while self.free > 0 and self.queue:
            waiter = min(self.queue, key=lambda waiter: waiter.rank)
            self.queue.remove(waiter)
            if not waiter.ready.cancelled():
                self.free -= 1
                waiter.ready.set_result(None)

    def _rank(self, priority: int) -> float:
        return self.clock() + AGE_S * priority

    def _displaceable(self, rank: float) -> list[Waiter]:
        """Waiting requests that make room for one of this rank; the last goes first."""
        behind = sorted(
            (waiter for waiter in self.queue if waiter.priority > self.live), key=lambda waiter: waiter.rank
        )
        return [waiter for waiter in behind[1:] if waiter.rank > rank]

    def _refuse(self) -> Overloaded:
        self.shed += 1
        wait = self.mean_s * (self.inside - self.running + 1) / self.running
        return Overloaded(
            "too many requests are waiting", retry_after_s=min(max(wait, 1.0), MAX_RETRY_AFTER_S)
        )


class Uploads:
    """Arriving bodies: at most ``per_client`` of a client, and ``max_bytes`` of all together."""

    def __init__(self, per_client: int, max_bytes: int):
        self.per_client, self.max_bytes = per_client, max_bytes
        self.clients, self.bytes = Counter[str](), 0

    @contextlib.contextmanager
    def enter(self, client: str) -> Iterator[Callable[[int], None]]:
        """Count a body; the result counts its bytes as they arrive. Both raise Overloaded."""
        if self.clients[client] >= self.per_client:
            message = f"this client is sending {self.per_client} bodies already: wait until they have arrived"
            raise Overloaded(message, retry_after_s=1.0)
        received = 0

        def receive(size: int) -> None:
            nonlocal received
            if self.bytes + size > self.max_bytes:
                raise Overloaded("too many large bodies are arriving", retry_after_s=1.0)
            self.bytes += size
            received += size

        self.clients[client] += 1
        try:
            yield receive
        finally:
            self.bytes -= received
            self.clients[client] -= 1
            if not self.clients[client]:
                del self.clients[client]


class ByteBudget:
    """At most ``limit`` bytes in use, first come first served; at most as many are waited for."""

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0
        self.queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        """Wait until ``size`` bytes are free, and hold them. Raises Overloaded."""
        if self.queue or self.used + size > self.limit:
            if sum(waiting for waiting, _ in self.queue) + size > self.limit:
                raise Overloaded("too many large pictures are being processed", retry_after_s=2.0)
            entry = size, asyncio.get_running_loop().create_future()
            self.queue.append(entry)
            try:
                await entry[1]
            except asyncio.CancelledError:
                if entry in self.queue:
                    self.queue.remove(entry)
                elif not entry[1].cancelled():  # granted in the meantime
                    self.used -= size
                self._release(0)
                raise
        else:
            self.used += size
        try:
            yield
        finally:
            self._release(size)

    def _release(self, size: int) -> None:
        self.used -= size
        while self.queue and self.used + self.queue[0][0] <= self.limit:
            granted, ready = self.queue.popleft()
            if not ready.cancelled():
                self.used += granted
                ready.set_result(None)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limit and rest of a client's tightest window; ``retry_after_s`` if the request was refused."""

    limit: int
    remaining: int
    reset_s: float
    retry_after_s: float | None = None

    def headers(self) -> dict[str, str]:
        """The ``x-ratelimit-*-requests`` headers of OpenAI, with durations such as ``1h2m3s``."""
        whole = math.ceil(self.reset_s)
        hours, minutes = whole // 3600, whole % 3600 // 60
        reset = f"{hours}h" * bool(hours) + f"{minutes}m" * bool(hours or minutes) + f"{whole % 60}s"
        return {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": reset,
        }


class RateLimits:
    """The most accepted requests of a client in any minute and hour; 0 is no limit."""

    def __init__(
        self,
        per_minute: int,
        per_hour: int,
        clock: Callable[[], float] = time.monotonic,
        clients: int = MAX_CLIENTS,
    ):
        self.windows = [(limit, span) for limit, span in ((per_minute, 60.0), (per_hour, 3600.0)) if limit]
        self.clock, self.max_clients = clock, clients
        self.accepted: OrderedDict[str, deque[float]] = OrderedDict()
        self.refused = 0

    def take(self, client: str) -> Allowance | None:
        """Count a request of ``client`` unless refused; None without limits."""
        if not self.windows:
            return None
        now = self.clock()
        times = self.accepted.setdefault(client, deque())
        self.accepted.move_to_end(client)
        while times and times[0] <= now - max(span for _, span in self.windows):
            times.popleft()
        waits = [times[-limit] + span - now for limit, span in self.windows if len(times) >= limit]
        wait = max(waits, default=0.0)
        if wait > 0:
            self.refused += 1
        else:
            times.append(now)
        if len(self.accepted) > self.max_clients:
            self.accepted.popitem(last=False)
        windows = []
        for limit, span in self.windows:
            inside = sum(at > now - span for at in times)
            windows.append((limit - inside, limit, times[-1] + span - now if inside else 0.0))
        remaining, limit, reset = min(windows)
        return Allowance(limit, remaining, reset, wait if wait > 0 else None)
