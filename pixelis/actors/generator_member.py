"""A generator as a router knows it: its actor, work and version, and whether its process hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from pixelis.errors import InfraFailure

HUNG_CHECKS = 15
"""Health checks in a row that a hung process misses. Slow processes answer all of them."""


class GeneratorHung(InfraFailure):
    """The process of a generator answers nothing."""


class WrongVersion(InfraFailure):
    """A generator returned a group of another version than expected."""


@dataclass(eq=False)
class Member:
    """A generator, or its name, episodes in flight, and the version that it last reported.

    recovery: ends its quarantine; watch: ends when the process hangs, while episodes are in flight; answered:
    actor that has answered. One that has not may be loading its model.
    """

    actor: ActorHandle | str
    running: int = 0
    version: int | None = None
    failed_at: float = float("-inf")
    reservation: Reservation | None = None
    recovery: asyncio.Task | None = None
    watch: asyncio.Task | None = None
    answered: ActorHandle | None = None
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return str(self.actor)  # of a handle: its class and id

    @property
    def quarantined(self) -> bool:
        return self.recovery is not None and not self.recovery.done()

    async def answer(self, call: Awaitable[Any], deadline: float) -> Any:
        """The answer. TimeoutError at the monotonic time `deadline`, GeneratorHung when the watch ends."""
        answer, watch = asyncio.ensure_future(call), self.watch
        tasks = {answer} if watch is None else {answer, watch}
        try:
            await asyncio.wait(
                tasks, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            if answer.done():
                return answer.result()
            if watch is None or not watch.done():
                raise TimeoutError
            watch.result()
            raise GeneratorHung(f"generator {self.name} hangs")
        finally:
            answer.cancel()


@dataclass(eq=False)
class Reservation:
    """Generators that hold `version` until `released`, whichever version is loaded on the others."""

    version: int
    released: asyncio.Event = field(default_factory=asyncio.Event)


def root_cause(error: BaseException) -> BaseException:
    while isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
        error = error.cause
    return error
