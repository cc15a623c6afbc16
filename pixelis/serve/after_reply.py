"""Stores the experience of an answer, credits neighbours, and makes update tasks of confident verdicts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis.actors.memory import UNAVAILABLE
from pixelis.config import Config
from pixelis.errors import BadInput, InfraFailure
from pixelis.evolution import privacy
from pixelis.evolution.updates import make_task
from pixelis.files import REASONS
from pixelis.memory import Entry
from pixelis.records import Experience, Feedback, Verdict, new_id
from pixelis.serve.agent_types import AgentQuery, Answer
from pixelis.serve.retrieval import Lookup, Retrieval
from pixelis.telemetry import tracing

log = logging.getLogger(__name__)
Result = TypeVar("Result")

COLD_PRIORITY = 0.9
VECTOR_TIMEOUT_S = 30.0
"""Longest wait for an experience's vector. Without one it is stored, but no search finds it."""
START_DELAY_S = 0.05
"""Delay of other work, which holds the interpreter, until the reply is encoded and sent."""

EXPECTED = (RayError, InfraFailure, TimeoutError)
MAX_VOTERS = 10_000
EVOLUTION_TIMEOUT_S = 30.0
"""Timeout of calls to Evolution: calls that wait for its restart must not fill the background."""


class AfterReply:
    """Stores an answer's experience, for which its reply waits, and then does the rest of the work.

    Handles at most ``evolution.queue`` answers at once and never fails a reply. ``evolution`` returns the
    actor's handle; None if the service does not learn.
    """

    def __init__(
        self,
        config: Config,
        retrieval: Retrieval,
        evolution: Callable[[], Awaitable[ActorHandle]] | None,
        counts: Counter[str],
    ):
        self.config, self.retrieval, self.evolution, self.counts = config, retrieval, evolution, counts
        self.background: dict[str, asyncio.Task[None]] = {}
        self.unclear: Counter[str] = Counter()
        """Verdicts below the gate by voter, since the voter's last task."""
        self.gated_in_a_row = 0
        # Its own thread: the shared ones decode the pictures of requests that callers wait for.
        self.thread = ThreadPoolExecutor(1, "after-reply")

    async def remember(self, answer: Answer, query: AgentQuery, lookup: Lookup) -> None:
        """Start this work and wait until the experience is on disk, at most ``memory.write_timeout_s``.

        Sets ``experience_id`` and ``remembered``.
        """
        c = self.config
        remember = self.retrieval.writes and bool(query.remember)
        learns = self.evolution is not None and c.evolution.enabled and not c.serve.read_only
        learn = learns and query.learn and not answer.cold_start
        if not (remember or learn):
            return
        if len(self.background) >= c.evolution.queue:
            self.counts["follow_skipped"] += 1
            answer.remembered = "queue full" if remember else "no"
            return
        id, later = query.experience_id or new_id("exp"), query.remember == "later"
        storing = asyncio.create_task(
            self._remember(id, answer, query, lookup, remember, START_DELAY_S if later else 0.0)
        )
        self._start(id, self._follow(id, answer, query.voter, lookup, storing, learn))
        if later:
            answer.remembered = "later"
        elif remember:
            await asyncio.wait([storing], timeout=c.memory.write_timeout_s)
            answer.remembered = storing.result()[1] if storing.done() else UNAVAILABLE
            answer.experience_id = id if answer.remembered == "yes" else None
            self.counts["not_remembered"] += answer.experience_id is None

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self.background.pop(name, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.counts["follow_failed"] += 1
                log.error("work after a reply failed", exc_info=error)

        task = self.background[name] = asyncio.create_task(work)
        task.add_done_callback(ended)

    async def drain(self, timeout_s: float) -> None:
        if self.background:
            await asyncio.wait(list(self.background.values()), timeout=timeout_s)

    async def _remember(
        self, id: str, answer: Answer, query: AgentQuery, lookup: Lookup, remember: bool, delay_s: float
    ) -> tuple[Experience | None, str]:
        """The redacted experience, and "yes" once it is on disk, otherwise why not."""
        try:
            await asyncio.sleep(delay_s)
            redacting = self._in_thread(lambda: privacy.redact_record(as_experience(id, answer, query)))
            if not remember:
                return await redacting, "no"
            assert self.retrieval.memory is not None
            redacted, pictures, vector = await asyncio.gather(
                redacting, self._pictures(id, answer), _vector(lookup.vector)
            )
            answer.pngs = pictures
            self.counts["no_vector"] += vector is None
            with tracing.span("store", experience=id):
                await self.retrieval.memory.add([Entry(redacted, vector, pictures)])
            self.counts["remembered"] += 1
            return redacted, "yes"
        except Exception as error:
            self.counts["remembered_failed"] += 1
            _log_failure("an experience is not stored", error)
            expected = isinstance(error, EXPECTED)
            return None, REASONS.get(getattr(error, "code", ""), UNAVAILABLE) if expected else "error"

    async def _follow(
        self,
        id: str,
        answer: Answer,
        voter: str,
        lookup: Lookup,
        storing: asyncio.Task[tuple[Experience | None, str]],
        learn: bool,
    ) -> None:
        redacted, outcome = await storing
        await asyncio.sleep(START_DELAY_S)
        risk = await self._in_thread(lambda: privacy.risk(answer.group.question.conversation))
        self.counts[f"privacy_risk_{risk.level}"] += 1
        if outcome == "yes":
            credit = self._credit_neighbours(answer.verdict, lookup.retrieval_id)
            await self._count("neighbours_credited", credit)
        # What cannot be stored is not learnt from: nobody could find or correct it
        if learn and redacted is not None:
            await self._count("update_sent", self._submit_update(id, answer, redacted, voter))

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def _count(self, name: str, work: Awaitable[Any]) -> None:
        """Count ``work`` as ``name`` or ``name_failed``, or as neither if it returns False."""
        try:
            if await work is not False:
                self.counts[name] += 1
        except Exception as error:
            self.counts[f"{name}_failed"] += 1
            _log_failure(f"{name} failed", error)

    async def _pictures(self, id: str, answer: Answer) -> dict[str, bytes]:
        if not self.config.memory.pictures:
            return {}
        try:
            return await winner_pngs(answer)
        except RayError as error:  # lost with their generator
            self.counts["no_pictures"] += 1
            log.warning("experience %s is stored without pictures: %s", id, type(error).__name__)
            return {}

    async def _credit_neighbours(self, verdict: Verdict, retrieval_id: str) -> bool:
        """Tell the memory which neighbours voted for the verdict's answer; False without any."""
        agreed = [v.id for v in verdict.votes if v.source == "neighbour" and v.elected]
        if agreed and self.retrieval.memory is not None:
            await self.retrieval.memory.succeeded(retrieval_id, agreed)
        return bool(agreed)

    async def feedback(self, experience_id: str, feedback: Feedback, by: str = "client") -> Experience:
        """Redact feedback, store it with its experience and send it to Evolution.

        Raises BadInput without a memory and for an unknown id, InfraFailure.
        """
        if not self.retrieval.writes or self.retrieval.memory is None:
            raise BadInput("this service stores nothing, so it accepts no feedback", code="no_memory")
        redacted = privacy.redact_record(feedback)
        redacted = redacted.model_copy(update={"created_at": redacted.created_at or time.time()})
        experience = await self.retrieval.memory.feedback(experience_id, redacted)
        self.counts["feedback"] += 1
        if self.evolution is not None:
            sending = self._call_evolution("feedback", experience_id, redacted, by)
            self._start(new_id("feedback"), self._count("feedback_sent", sending))
        return experience

    async def _call_evolution(self, method: str, *arguments: Any) -> Any:
        assert self.evolution is not None
        async with asyncio.timeout(EVOLUTION_TIMEOUT_S):
            return await getattr(await self.evolution(), method).remote(*arguments)

    async def _submit_update(self, id: str, answer: Answer, redacted: Experience, voter: str) -> bool:
        """False if the gate or Evolution refuses the task."""
        c, verdict = self.config, answer.verdict
        task = await self._in_thread(
            lambda: make_task(answer.group, verdict, c.evolution, c.rewards, experience_id=id, user=voter)
        )
        if task is None:
            self.counts["gated"] += 1
            self.gated_in_a_row += 1
            self.unclear[voter] += 1
            if len(self.unclear) > MAX_VOTERS:
                del self.unclear[next(iter(self.unclear))]
            return False
        self.gated_in_a_row = 0
        unclear = self.unclear.pop(voter, 0)
        try:
            task = task.model_copy(update={"trace": tracing.traceparent()})
            stored = redacted.verdict, redacted.question, answer.originals, unclear
            accepted = await self._call_evolution("submit", task, answer.views, *stored)
        except BaseException:
            if unclear:
                self.unclear[voter] += unclear
            raise
        self.counts["update_refused"] += not accepted
        return bool(accepted)


def _log_failure(what: str, error: Exception) -> None:
    """A line for a failure of another process, without what it may quote; a trace for one of this process."""
    if isinstance(error, EXPECTED):
        log.warning("%s: %s", what, error if isinstance(error, InfraFailure) else type(error).__name__)
    else:
        log.error(what, exc_info=error)


async def winner_pngs(answer: Answer) -> dict[str, bytes]:
    """The winner's views as PNG by image id. Raises RayError if they are lost."""
    views = (await answer.views.get())[answer.winner.id]
    pairs = list(zip(answer.winner.images, views, strict=True))
    return await asyncio.to_thread(lambda: {image.id: privacy.clean_png(view) for image, view in pairs})


def as_experience(id: str, answer: Answer, query: AgentQuery) -> Experience:
    """The experience of an answer before redaction; the priority of uncertain answers is higher."""
    return Experience(
        id=id,
        question=answer.group.question,
        trajectory=answer.winner,
        verdict=answer.verdict,
        policy_version=answer.group.policy_version,
        created_at=time.time(),
        user=query.user,
        priority=COLD_PRIORITY if answer.cold_start else 0.5 * (1 - answer.verdict.confidence) + 0.25,
        cold_start=answer.cold_start,
        response=query.response(answer) if query.response is not None else None,
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
