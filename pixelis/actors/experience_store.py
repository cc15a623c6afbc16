"""Redacts experiences and stores them with the pictures that the policy saw."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
from ray.exceptions import RayError

from pixelis.actors.background_work import EXPECTED, log_failure
from pixelis.actors.group_views import GroupViews
from pixelis.actors.memory import UNAVAILABLE, Memory
from pixelis.evolution import privacy
from pixelis.files import REASONS
from pixelis.memory import Entry
from pixelis.records import Experience, Trajectory
from pixelis.telemetry import tracing

log = logging.getLogger(__name__)
Result = TypeVar("Result")

VECTOR_TIMEOUT_S = 30.0
"""Longest wait for an experience's vector. Without one it is stored, but no search finds it."""
YES = "yes"


class Stored(NamedTuple):
    """The redacted experience, None if that failed; "yes" once it is on disk, otherwise why not; its PNGs."""

    redacted: Experience | None
    outcome: str
    pngs: Mapping[str, bytes] = MappingProxyType({})


class ExperienceStore:
    """``pictures``: whether they are stored."""

    def __init__(self, pictures: bool, counts: Counter[str]):
        self.pictures, self.counts = pictures, counts
        # Its own thread: the shared ones decode the pictures of requests that callers wait for.
        self.thread = ThreadPoolExecutor(1, "experiences")

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def put(
        self,
        make: Callable[[], Experience],
        trajectory: Trajectory,
        views: GroupViews,
        memory: Memory | None,
        vector: asyncio.Task[np.ndarray] | None = None,
    ) -> Stored:
        """Redact the experience of a trajectory and, with a ``memory``, store it. Idempotent, never raises."""
        try:
            redacting = self.in_thread(lambda: privacy.redact_record(make()))
            if memory is None:
                return Stored(await redacting, "no")
            redacted, pngs, known = await asyncio.gather(
                redacting, self._pngs(trajectory, views), _vector(vector)
            )
            self.counts["no_vector"] += known is None
            with tracing.span("store", experience=redacted.id):
                await memory.add([Entry(redacted, known, pngs)])
            self.counts["remembered"] += 1
            return Stored(redacted, YES, pngs)
        except Exception as error:
            self.counts["remembered_failed"] += 1
            log_failure("an experience is not stored", error)
            expected = isinstance(error, EXPECTED)
            return Stored(None, REASONS.get(getattr(error, "code", ""), UNAVAILABLE) if expected else "error")

    async def _pngs(self, trajectory: Trajectory, views: GroupViews) -> dict[str, bytes]:
        """The trajectory's views, if they are to be stored and not lost."""
        if not self.pictures:
            return {}
        try:
            return await view_pngs(trajectory, views)
        except RayError as error:  # lost with their generator
            self.counts["no_pictures"] += 1
            log.warning("an experience is stored without pictures: %s", type(error).__name__)
            return {}


async def view_pngs(trajectory: Trajectory, views: GroupViews) -> dict[str, bytes]:
    """The trajectory's views as PNG by image id. Raises RayError if they are lost."""
    pairs = list(zip(trajectory.images, (await views.get())[trajectory.id], strict=True))
    return await asyncio.to_thread(lambda: {image.id: privacy.clean_png(view) for image, view in pairs})


async def _vector(vector: asyncio.Task[np.ndarray] | None) -> np.ndarray | None:
    """None if its task failed or does not finish in time."""
    if vector is None:
        return None
    await asyncio.wait([vector], timeout=VECTOR_TIMEOUT_S)
    if not vector.done():
        vector.cancel()
        return None
    return None if vector.cancelled() or vector.exception() is not None else vector.result()
