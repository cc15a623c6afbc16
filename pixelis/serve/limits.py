"""Limits of a replica: a bounded queue, and request windows for each client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from pixelis.config import Config
from pixelis.errors import Overloaded

MAX_RETRY_AFTER_S = 60.0
MAX_CLIENTS = 10_000
"""Clients tracked at once; the one idle for longest is dropped first."""


def running_limit(config: Config, generators: int | None = None) -> int:
    """Requests that the generators can decode at once: the sequences of all engines divided by the samples of a request.

    generators: their number, default `engine.workers`.
    """
    return max(1, (generators or config.engine.workers) * config.engine.max_num_seqs // config.serve.samples)


def waiting_limit(config: Config, generators: int | None = None) -> int:
    """Requests that may wait behind the running ones."""
    return config.serve.max_queue or running_limit(config, generators)


class Admission:
    """A bounded queue: ``running`` requests are processed, ``waiting`` more may wait, further ones are refused at once."""

    def __init__(self, running: int, waiting: int):
        self.slots, self.capacity, self.running = asyncio.Semaphore(running), running + waiting, running
        self.inside = self.surplus = 0
        self.shed = 0
        self.mean_s = 1.0

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Count a request as inside. Raises Overloaded with the expected waiting time."""
        if self.inside >= self.capacity:
            self.shed += 1
            wait = self.mean_s * (self.inside - self.running + 1) / self.running
            raise Overloaded("too many requests are waiting", retry_after_s=min(max(wait, 1.0), MAX_RETRY_AFTER_S))
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def resize(self, running: int, waiting: int) -> None:
        """Change the limits. A lower one takes effect as running requests end."""
        self.surplus += self.running - running
        self.capacity, self.running = running + waiting, running
        while self.surplus < 0:
            self.surplus += 1
            self.slots.release()

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a free slot. Its duration updates the expected waiting time."""
        await self.slots.acquire()
        started = time.monotonic()
        try:
            yield
            self.mean_s += 0.1 * (time.monotonic() - started - self.mean_s)
        finally:
            if self.surplus > 0:
                self.surplus -= 1
            else:
                self.slots.release()


@dataclass(frozen=True, slots=True)
class Allowance:
    """A client's remaining rate: ``limit`` and ``remaining`` of its tightest window, and seconds until that is empty.

    ``retry_after_s`` is None if the request was accepted.
    """

    limit: int
    remaining: int
    reset_s: float
    retry_after_s: float | None = None

    def headers(self) -> dict[str, str]:
        """The ``x-ratelimit-*-requests`` headers as OpenAI names them."""
        return {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": _duration(self.reset_s),
        }


class RateLimits:
    """Sliding windows: a client may send ``per_minute`` requests in any minute and ``per_hour`` in any hour; 0 is no limit.

    The windows are exact, from the times of accepted requests. Refused requests do not count, so a client that keeps trying is
    accepted again.
    """

    def __init__(self, per_minute: int, per_hour: int, clock: Callable[[], float] = time.monotonic, clients: int = MAX_CLIENTS):
        self.windows = [(limit, span) for limit, span in ((per_minute, 60.0), (per_hour, 3600.0)) if limit]
        self.clock, self.max_clients = clock, clients
        self.accepted: OrderedDict[str, deque[float]] = OrderedDict()
        self.refused = 0

    def take(self, client: str) -> Allowance | None:
        """Count a request of ``client`` unless it is refused, and return the remaining rate; None without limits."""
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
            inside = sum(1 for _ in itertools.takewhile(lambda at, since=now - span: at > since, reversed(times)))  # type: ignore[misc]
            windows.append((limit - inside, limit, times[-1] + span - now if inside else 0.0))
        remaining, limit, reset = min(windows)
        return Allowance(limit, remaining, reset, wait if wait > 0 else None)


def _duration(seconds: float) -> str:
    """``1h2m3s``, OpenAI's format of durations."""
    whole = math.ceil(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}h" * bool(hours) + f"{minutes}m" * bool(hours or minutes) + f"{whole % 60}s"
