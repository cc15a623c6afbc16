"""Work after a reply: stores the experience, credits neighbours that agreed, turns a confident verdict into an update task."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis.config import Config
from pixelis.errors import BadInput, InfraFailure
from pixelis.evolution import privacy
from pixelis.evolution.updates import make_task
from pixelis.evolution.vote import agrees
from pixelis.memory import Entry
from pixelis.records import Experience, Feedback, Verdict, new_id
from pixelis.serve.agent_types import AgentQuery, Answer
from pixelis.serve.retrieval import Lookup, Retrieval

log = logging.getLogger(__name__)
Result = TypeVar("Result")

COLD_PRIORITY = 0.9
VECTOR_S = 30.0
"""Seconds that an experience waits for its vector; without one it is kept, and never found."""
REPLY_FIRST_S = 0.05
"""Seconds in which the reply is encoded and sent: redaction would hold the interpreter that it needs."""
EVOLUTION_S = 30.0
"""Seconds that Evolution has to take something: while it restarts, its callers must not fill the background for good."""


class AfterReply:
    """Works in the background on at most ``evolution.queue`` answers at once: it never delays a reply and never fails one.

    ``evolution`` gives the actor's handle, None when nothing is learnt. What becomes of each answer is counted.
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
        # A thread of its own: the shared ones decode the pictures of requests that somebody waits for.
        self.thread = ThreadPoolExecutor(1, "after-reply")

    def later(self, answer: Answer, query: AgentQuery, lookup: Lookup) -> None:
        """Begin what follows this answer; nothing at all in a read-only service. Takes the id from an answer that is not kept."""
        c = self.config
        remember = self.retrieval.writes and query.remember
        learn = (
            self.evolution is not None and c.evolution.enabled and query.learn and not answer.cold_start and not c.serve.read_only
        )
        if (remember or learn) and len(self.background) >= c.evolution.queue:
            self.counts["skipped"] += 1
            remember = learn = False
        name = answer.experience_id or ""
        if not remember:
            answer.experience_id = None
        if remember or learn:
            self._begin(name, self._follow(answer, query, lookup, remember, learn))

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self.background.pop(name, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.counts["follow_failed"] += 1
                log.error("what follows a reply failed", exc_info=error)

        task = self.background[name] = asyncio.create_task(work)
        task.add_done_callback(ended)

    async def drain(self, timeout_s: float) -> None:
        """Return once what has begun is done, at most ``timeout_s`` seconds later."""
        if self.background:
            await asyncio.wait(list(self.background.values()), timeout=timeout_s)

    async def _follow(self, answer: Answer, query: AgentQuery, lookup: Lookup, remember: bool, learn: bool) -> None:
        await asyncio.sleep(REPLY_FIRST_S)
        user = privacy.pseudonym(query.user) if query.user else None
        redacted = await self._aside(lambda: privacy.redact_record(as_experience(answer, user)))
        risk = await self._aside(lambda: privacy.risk(answer.group.question.question))
        self.counts[f"privacy_risk_{risk.level}"] += 1
        if remember:
            await self._counted("remembered", self._remember(answer, redacted, lookup))
            await self._counted("success_told", self._tell(answer.verdict, lookup.retrieval_id))
        if learn:
            await self._counted("update_sent", self._learn(answer, redacted))

    async def _aside(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def _counted(self, name: str, work: Awaitable[Any]) -> None:
        """Do it, and count it under ``name`` or ``name_failed``; False is neither."""
        try:
            if await work is not False:
                self.counts[name] += 1
        except (RayError, InfraFailure, TimeoutError) as error:
            self.counts[f"{name}_failed"] += 1
            log.warning("%s failed: %s", name, type(error).__name__)
        except Exception:
            self.counts[f"{name}_failed"] += 1
            log.exception("%s failed", name)

    # -- memory -----------------------------------------------------------------------------------------------------

    async def _remember(self, answer: Answer, redacted: Experience, lookup: Lookup) -> None:
        assert self.retrieval.memory is not None
        pictures: dict[str, bytes] = {}
        if self.config.memory.pictures:
            try:
                views = (await _value(answer.views))[answer.winner.id]
            except RayError as error:  # lost with their generator; the caller was told the id of what is kept
                self.counts["no_pictures"] += 1
                log.warning("pictures of an answer were lost: %s", type(error).__name__)
                views = []
            named = list(zip(answer.winner.images, views, strict=True)) if views else []
            pictures = await self._aside(lambda: {image.id: privacy.clean_png(view) for image, view in named})
        vector = await _in_time(lookup.vector)
        self.counts["no_vector"] += vector is None
        await self.retrieval.memory.add([Entry(redacted, vector, pictures)])

    async def _tell(self, verdict: Verdict, retrieval_id: str) -> bool:
        """Tell the neighbours that voted for the verdict's answer; False when there was none."""
        answer = verdict.answer
        agreed = [v.id for v in verdict.votes if v.source == "neighbour" and answer is not None and agrees(v.answer, answer)]
        if agreed and self.retrieval.memory is not None:
            await self.retrieval.memory.succeeded(retrieval_id, agreed)
        return bool(agreed)

    async def feedback(self, experience_id: str, feedback: Feedback) -> Experience:
        """Keep what somebody said of an answer, redacted, and tell Evolution.

        Raises BadInput in a read-only service and for an id under which nothing is remembered, InfraFailure.
        """
        if not self.retrieval.writes or self.retrieval.memory is None:
            raise BadInput("this service remembers nothing, so it takes no feedback", code="no_memory")
        if (task := self.background.get(experience_id)) is not None:
            await asyncio.wait([task])  # it was answered a moment ago and is being stored
        said = privacy.redact_record(feedback)
        said = said.model_copy(update={"created_at": said.created_at or time.time()})
        experience = await self.retrieval.memory.feedback(experience_id, said)
        self.counts["feedback"] += 1
        if self.evolution is not None:
            self._begin(new_id("feedback"), self._counted("feedback_told", self._pass_on(experience_id, said)))
        return experience

    async def _pass_on(self, experience_id: str, feedback: Feedback) -> None:
        assert self.evolution is not None
        async with asyncio.timeout(EVOLUTION_S):
            await _value((await self.evolution()).feedback.remote(experience_id, feedback))

    # -- evolution --------------------------------------------------------------------------------------------------

    async def _learn(self, answer: Answer, redacted: Experience) -> bool:
        """False when the gate is closed, or Evolution takes no tasks now."""
        c, verdict = self.config, answer.verdict
        assert self.evolution is not None
        kept = answer.experience_id or ""
        task = await self._aside(partial(make_task, answer.group, verdict, c.evolution, c.rewards, experience_id=kept))
        if task is None:
            self.counts["gated"] += 1
            return False
        async with asyncio.timeout(EVOLUTION_S):
            actor = await self.evolution()
            # In a list the reference itself travels: the pictures stay where they are until the learner wants them.
            taken = await _value(actor.submit.remote(task, [answer.views], redacted.verdict, redacted.question))
        if not taken:
            self.counts["update_refused"] += 1
            return False
        return True


def as_experience(answer: Answer, user: str | None) -> Experience:
    """What is worth keeping of an answer, before redaction; ``user`` is a pseudonym.

    Priority .5 (1 - confidence) + .25, of cold starts .9: what the policy was unsure of is looked at first.
    """
    return Experience(
        id=answer.experience_id or "",
        question=answer.group.question,
        trajectory=answer.winner,
        verdict=answer.verdict,
        policy_version=answer.group.policy_version,
        created_at=time.time(),
        user=user,
        priority=COLD_PRIORITY if answer.cold_start else 0.5 * (1 - answer.verdict.confidence) + 0.25,
        cold_start=answer.cold_start,
    )


async def _in_time(vector: asyncio.Task[np.ndarray] | None) -> np.ndarray | None:
    """The vector, None when it failed (which was logged) or does not come."""
    if vector is None:
        return None
    await asyncio.wait([vector], timeout=VECTOR_S)
    if not vector.done():
        vector.cancel()
        return None
    return None if vector.cancelled() or vector.exception() is not None else vector.result()


async def _value(ref: ray.ObjectRef) -> Any:
    return await ref
