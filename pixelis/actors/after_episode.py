"""What follows an answer or an episode: its experience is stored, and its update task sent to Evolution."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis.actors.group_views import GroupViews
from pixelis.actors.memory import UNAVAILABLE, Memory
from pixelis.config import Config
from pixelis.errors import InfraFailure
from pixelis.evolution import privacy
from pixelis.evolution.words import original
from pixelis.files import REASONS
from pixelis.memory import Entry
from pixelis.operations.pixel_budget import shrink
from pixelis.records import Experience, Question, Trajectory, UpdateTask, Verdict
from pixelis.telemetry import tracing

log = logging.getLogger(__name__)
Result = TypeVar("Result")
EXPECTED = (RayError, InfraFailure, TimeoutError)

VECTOR_TIMEOUT_S = 30.0
"""Longest wait for an experience's vector. Without one it is stored, but no search finds it."""
YES = "yes"
LONGEST = 1600
"""Longest side of an original that is stored."""
MAX_VOTERS = 10_000
EVOLUTION_TIMEOUT_S = 30.0
"""Timeout of calls to Evolution: calls that wait for its restart must not fill the background."""


class Stored(NamedTuple):
    """The redacted experience, None if that failed; "yes" once it is on disk, otherwise why not; its PNGs."""

    redacted: Experience | None
    outcome: str
    pngs: Mapping[str, bytes] = MappingProxyType({})


class AfterEpisode:
    """Stores experiences and sends update tasks, in the background.

    ``evolution`` returns the actor's handle; None if nothing is learnt. ``counts`` gets the outcomes.
    """

    def __init__(
        self, config: Config, evolution: Callable[[], Awaitable[ActorHandle]] | None, counts: Counter[str]
    ):
        self.config, self.evolution, self.counts = config, evolution, counts
        self.learns = evolution is not None and config.learns_online
        self.unclear: Counter[str] = Counter()
        """Verdicts below the gate by voter, since the voter's last task."""
        self.gated_in_a_row = 0
        self.tasks: dict[str, asyncio.Task[None]] = {}
        """The work in the background by name."""
        # Its own thread: the shared ones decode the pictures of requests that callers wait for.
        self.thread = ThreadPoolExecutor(1, "experiences")

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Do work in the background; a failure is counted."""

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

    async def store(
        self,
        make: Callable[[], Experience],
        trajectory: Trajectory,
        views: GroupViews,
        memory: Memory | None,
        vector: asyncio.Task[np.ndarray] | None = None,
        originals: Mapping[str, ray.ObjectRef] = MappingProxyType({}),
    ) -> Stored:
        """Redact the experience of a trajectory and, with a ``memory``, store it. Idempotent, never raises.

        ``originals``: pictures by medium to store beside the views, as evolution.words needs them.
        """
        try:
            redacting = self.in_thread(lambda: privacy.redact_record(make()))
            if memory is None:
                return Stored(await redacting, "no")
            redacted, pngs, sent, known = await asyncio.gather(
                redacting, self._pngs(trajectory, views), _original_pngs(originals), _vector(vector)
            )
            self.counts["no_vector"] += known is None
            with tracing.span("store", experience=redacted.id):
                await memory.add([Entry(redacted, known, {**pngs, **sent})])
            self.counts["remembered"] += 1
            return Stored(redacted, YES, pngs)
        except Exception as error:
            self.counts["remembered_failed"] += 1
            log_failure("an experience is not stored", error)
            expected = isinstance(error, EXPECTED)
            return Stored(None, REASONS.get(getattr(error, "code", ""), UNAVAILABLE) if expected else "error")

    async def _pngs(self, trajectory: Trajectory, views: GroupViews) -> dict[str, bytes]:
        """The trajectory's views, if they are to be stored and not lost."""
        if not self.config.memory.pictures:
            return {}
        try:
            return await view_pngs(trajectory, views)
        except RayError as error:  # lost with their generator
            self.counts["no_pictures"] += 1
            log.warning("an experience is stored without pictures: %s", type(error).__name__)
            return {}

    async def tell_evolution(self, method: str, *arguments: Any) -> Any:
        assert self.evolution is not None
        async with asyncio.timeout(EVOLUTION_TIMEOUT_S):
            return await getattr(await self.evolution(), method).remote(*arguments)

    def gated(self, voter: str) -> None:
        """Count a verdict below the gate."""
        self.counts["gated"] += 1
        self.gated_in_a_row += 1
        self.unclear[voter] += 1
        if len(self.unclear) > MAX_VOTERS:
            del self.unclear[next(iter(self.unclear))]

    async def send(
        self,
        task: UpdateTask,
        views: GroupViews,
        verdict: Verdict,
        question: Question,
        originals: Mapping[str, ray.ObjectRef] | None,
    ) -> bool:
        """See ``Evolution.submit``; verdict and question are redacted. False if Evolution refuses the task."""
        self.gated_in_a_row = 0
        unclear = self.unclear.pop(task.user, 0)
        try:
            task = task.model_copy(update={"trace": tracing.traceparent()})
            details = views, verdict, question, originals, unclear
            accepted = await self.tell_evolution("submit", task, *details)
        except BaseException:
            if unclear:
                self.unclear[task.user] += unclear
            raise
        self.counts["update_refused"] += not accepted
        return bool(accepted)


async def view_pngs(trajectory: Trajectory, views: GroupViews) -> dict[str, bytes]:
    """The trajectory's views as PNG by image id. Raises RayError if they are lost."""
    pairs = list(zip(trajectory.images, (await views.get())[trajectory.id], strict=True))
    return await asyncio.to_thread(lambda: {image.id: privacy.clean_png(view) for image, view in pairs})


async def _original_pngs(originals: Mapping[str, ray.ObjectRef]) -> dict[str, bytes]:
    """The pictures of a question as PNG, at most LONGEST pixels a side; none if they are lost."""
    try:
        pixels = await asyncio.gather(*originals.values())
    except RayError:
        return {}
    return await asyncio.to_thread(
        lambda: {
            original(id): privacy.clean_png(shrink(picture, LONGEST))
            for id, picture in zip(originals, pixels, strict=True)
        }
    )


async def _vector(vector: asyncio.Task[np.ndarray] | None) -> np.ndarray | None:
    """None if its task failed or does not finish in time."""
    if vector is None:
        return None
    await asyncio.wait([vector], timeout=VECTOR_TIMEOUT_S)
    if not vector.done():
        vector.cancel()
        return None
    return None if vector.cancelled() or vector.exception() is not None else vector.result()


def log_failure(what: str, error: Exception) -> None:
    """A line for a failure of another process, without what it may quote; a trace for one of this process."""
    if isinstance(error, EXPECTED):
        log.warning("%s: %s", what, error if isinstance(error, InfraFailure) else type(error).__name__)
    else:
        log.error(what, exc_info=error)
