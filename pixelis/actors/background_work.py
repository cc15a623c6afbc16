"""Runs work that nobody waits for, and counts and logs its failures."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Coroutine
from typing import Any

from ray.exceptions import RayError

from pixelis.errors import InfraFailure

log = logging.getLogger(__name__)
EXPECTED = (RayError, InfraFailure, TimeoutError)


class BackgroundWork:
    """Work by name; ``counts`` gets the failures."""

    def __init__(self, counts: Counter[str]):
        self.counts = counts
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self.tasks.pop(name, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.counts["follow_failed"] += 1
                log.error("work after a reply failed", exc_info=error)

        task = self.tasks[name] = asyncio.create_task(work)
        task.add_done_callback(ended)

    async def count(self, name: str, work: Awaitable[Any]) -> None:
        """Count ``work`` as ``name`` or ``name_failed``, or as neither if it returns False."""
        try:
            if await work is not False:
                self.counts[name] += 1
        except Exception as error:
            self.counts[f"{name}_failed"] += 1
            log_failure(f"{name} failed", error)

    async def drain(self, timeout_s: float) -> None:
        if self.tasks:
            await asyncio.wait(list(self.tasks.values()), timeout=timeout_s)


def log_failure(what: str, error: Exception) -> None:
    """A line for a failure of another process, without what it may quote; a trace for one of this process."""
    if isinstance(error, EXPECTED):
        log.warning("%s: %s", what, error if isinstance(error, InfraFailure) else type(error).__name__)
    else:
        log.error(what, exc_info=error)
