"""A generator as a router knows it: its actor, its work, the version that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayTaskError


@dataclass(eq=False)
class Member:
    """A generator: its actor or the actor's name, episodes in flight, and the version that it last reported.

    recovery: task that ends its quarantine.
    """

    actor: ActorHandle | str
    running: int = 0
    version: int | None = None
    failed_at: float = float("-inf")
    reservation: Reservation | None = None
    recovery: asyncio.Task | None = None
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return self.actor if isinstance(self.actor, str) else str(getattr(self.actor, "_ray_actor_id", self.actor))

    @property
    def quarantined(self) -> bool:
        return self.recovery is not None and not self.recovery.done()


@dataclass(eq=False)
class Reservation:
    """Generators that hold `version` until `released`, whichever version is loaded on the others."""

    version: int
    released: asyncio.Event = field(default_factory=asyncio.Event)


def root_cause(error: BaseException) -> BaseException:
    """The original exception of an actor that was called by an actor."""
    while isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
        error = error.cause
    return error


async def value_of(ref: Awaitable[Any]) -> Any:
    """The value of a reference."""
    return await ref
