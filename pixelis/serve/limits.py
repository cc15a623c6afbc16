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
"""Clients remembered at once; the one unseen for longest is forgotten first."""


def running_limit(config: Config) -> int:
    """Requests that the generators can decode together: rows of all engines over samples of a request."""
    return max(1, config.engine.workers * config.engine.max_num_seqs // config.serve.samples)


def waiting_limit(config: Config) -> int:
    """Requests that may wait for those that run."""
    return config.serve.max_queue or running_limit(config)


class Admission:
    """A bounded queue: ``running`` requests work, ``waiting`` more may wait, the next is refused at once."""

    def __init__(self, running: int, waiting: int):
        self.slots, self.capacity, self.running = asyncio.Semaphore(running), running + waiting, running
        self.inside = 0
        self.shed = 0
        self.mean_s = 1.0

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Count the request in. Raises Overloaded with the time in which the queue should have moved."""
        if self.inside >= self.capacity:
            self.shed += 1
            wait = self.mean_s * (self.inside - self.running + 1) / self.running
            raise Overloaded("too many requests are waiting", retry_after_s=min(max(wait, 1.0), MAX_RETRY_AFTER_S))
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a free slot, and learn from how long it was held."""
        async with self.slots:
            started = time.monotonic()
            yield
            self.mean_s += 0.1 * (time.monotonic() - started - self.mean_s)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a client may still do: ``limit`` and ``remaining`` of its tightest window, seconds until that is whole again.

    ``retry_after_s`` is None while another request is taken.
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
            "x-ratelimit-reset-requests": _span(self.reset_s),
        }


class RateLimits:
    """Sliding windows: of one client at most ``per_minute`` requests in any minute and ``per_hour`` in any hour; 0 is no limit.

    Exact: the times of the taken requests are kept, at most the larger limit of a client. Refused requests do not count, so a
    client that keeps asking is let in again. Unlike fixed windows or a bucket that refills, no minute holds two minutes' worth.
    """

    def __init__(self, per_minute: int, per_hour: int, clock: Callable[[], float] = time.monotonic, clients: int = MAX_CLIENTS):
        self.windows = [(limit, span) for limit, span in ((per_minute, 60.0), (per_hour, 3600.0)) if limit]
        self.clock, self.max_clients = clock, clients
        self.taken: OrderedDict[str, deque[float]] = OrderedDict()
        self.refused = 0

    def take(self, client: str) -> Allowance | None:
        """Count a request of ``client`` and say what is left, with ``retry_after_s`` when it is refused; None without limits."""
        if not self.windows:
            return None
        now = self.clock()
        times = self.taken.setdefault(client, deque())
        self.taken.move_to_end(client)
        while times and times[0] <= now - max(span for _, span in self.windows):
            times.popleft()
        waits = [times[-limit] + span - now for limit, span in self.windows if len(times) >= limit]
        wait = max(waits, default=0.0)
        if wait > 0:
            self.refused += 1
        else:
            times.append(now)
        if len(self.taken) > self.max_clients:
            self.taken.popitem(last=False)
        left = []
        for limit, span in self.windows:
            inside = sum(1 for _ in itertools.takewhile(lambda at, since=now - span: at > since, reversed(times)))  # type: ignore[misc]
            left.append((limit - inside, limit, times[-1] + span - now if inside else 0.0))
        remaining, limit, reset = min(left)
        return Allowance(limit, remaining, reset, wait if wait > 0 else None)


def _span(seconds: float) -> str:
    """``1h2m3s`` as OpenAI writes spans of time."""
    whole = math.ceil(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}h" * bool(hours) + f"{minutes}m" * bool(hours or minutes) + f"{whole % 60}s"
