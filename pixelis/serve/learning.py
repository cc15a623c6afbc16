"""What follows a reply: the experience is kept, neighbours that agreed are told, a confident verdict becomes an update task."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis.config import Config
from pixelis.errors import BadInput, InfraFailure
from pixelis.evolution.updates import make_task
from pixelis.evolution.vote import agrees
from pixelis.records import Experience, Feedback, ImageView, Question, Verdict
from pixelis.serve.events import Answer, Ask
from pixelis.serve.recall import Lookup, Recall

log = logging.getLogger(__name__)

COLD_PRIORITY = 0.9
VECTOR_S = 30.0
"""Seconds that an experience waits for its vector; without one it is kept, and never found."""


class Learning:
    """Works in the background on at most ``evolution.queue`` answers at once: it never delays a reply and never fails one.

    ``evolution`` gives the actor's handle, None when nothing is learnt. What becomes of each answer is counted.
    """

    def __init__(
        self,
        config: Config,
        recall: Recall,
        evolution: Callable[[], Awaitable[ActorHandle]] | None,
        counts: Counter[str],
    ):
        self.config, self.recall, self.evolution, self.counts = config, recall, evolution, counts
        self.background: dict[str, asyncio.Task[None]] = {}

    def later(self, answer: Answer, ask: Ask, lookup: Lookup) -> None:
        """Begin what follows this answer; nothing at all in a read-only service. Takes the id from an answer that is not kept."""
        c = self.config
        remember = self.recall.writes and ask.remember
        learn = (
            self.evolution is not None and c.evolution.enabled and ask.learn and not answer.cold_start and not c.serve.read_only
        )
        if (remember or learn) and len(self.background) >= c.evolution.queue:
            self.counts["skipped"] += 1
            remember = learn = False
        name, kept = answer.experience_id or "", remember
        if not remember:
            answer.experience_id = None
        if remember or learn:
            task = asyncio.create_task(self._follow(answer, ask, lookup, kept, learn))
            self.background[name] = task
            task.add_done_callback(lambda _: self.background.pop(name, None))

    async def drain(self, timeout_s: float) -> None:
        """Return once what has begun is done, at most ``timeout_s`` seconds later."""
        if self.background:
            await asyncio.wait(list(self.background.values()), timeout=timeout_s)

    async def _follow(self, answer: Answer, ask: Ask, lookup: Lookup, remember: bool, learn: bool) -> None:
        if remember:
            await self._counted("remembered", self._remember(answer, ask, lookup))
        if lookup.retrieval_id and answer.verdict.answer is not None:
            agreed = [v.id for v in answer.verdict.votes if v.source == "neighbour" and agrees(v.answer, answer.verdict.answer)]
            if agreed:
                await self._counted("success_told", self.recall.memory.succeeded(lookup.retrieval_id, agreed))
        if learn:
            await self._counted("update_sent", self._learn(answer))

    async def _counted(self, name: str, work: Awaitable[Any]) -> None:
        """Do it, and count it under ``name`` or ``name_failed``; False is neither."""
        try:
            if await work is not False:
                self.counts[name] += 1
        except (RayError, InfraFailure) as error:
            self.counts[f"{name}_failed"] += 1
            log.warning("%s failed: %s", name, type(error).__name__)
        except Exception:
            self.counts[f"{name}_failed"] += 1
            log.exception("%s failed", name)

    # -- memory -----------------------------------------------------------------------------------------------------

    async def _remember(self, answer: Answer, ask: Ask, lookup: Lookup) -> None:
        from pixelis.evolution import privacy
        from pixelis.memory import Entry

        views = (await _value(answer.views))[answer.winner.id] if self.config.memory.pictures else []
        vector = await _in_time(lookup.vector)
        if vector is None:
            self.counts["no_vector"] += 1

        def entry() -> Entry:
            user = privacy.pseudonym(ask.user) if ask.user else None
            experience = privacy.redact_experience(as_experience(answer, user))
            pictures = {i.id: privacy.clean_png(view) for i, view in zip(answer.winner.images, views, strict=bool(views))}
            return Entry(experience=experience, vector=vector, pictures=pictures)

        await self.recall.memory.add([await asyncio.to_thread(entry)])

    async def feedback(self, experience_id: str, feedback: Feedback) -> Experience:
        """Keep what somebody said of an answer, redacted, and tell Evolution.

        Raises BadInput in a read-only service and for an id under which nothing is remembered, InfraFailure.
        """
        from pixelis.evolution import privacy

        if not self.recall.writes:
            raise BadInput("this service remembers nothing, so it takes no feedback", code="no_memory")
        if (task := self.background.get(experience_id)) is not None:
            await asyncio.wait([task])  # it was answered a moment ago and is being stored
        said = feedback.model_copy(
            update={
                "answer": None if feedback.answer is None else privacy.redact(feedback.answer),
                "comment": privacy.redact(feedback.comment),
                "created_at": feedback.created_at or time.time(),
            }
        )
        experience = await self.recall.memory.feedback(experience_id, said)
        self.counts["feedback"] += 1
        if self.evolution is not None:
            actor = await self.evolution()
            await self._counted("feedback_told", _value(actor.feedback.remote(experience_id, said)))
        return experience

    # -- evolution --------------------------------------------------------------------------------------------------

    async def _learn(self, answer: Answer) -> bool:
        """False when the gate is closed, or Evolution takes no tasks now."""
        c, verdict = self.config, answer.verdict
        assert self.evolution is not None
        kept = answer.experience_id or ""
        task = await asyncio.to_thread(make_task, answer.group, verdict, c.evolution, c.rewards, experience_id=kept)
        if task is None:
            self.counts["gated"] += 1
            return False
        actor = await self.evolution()
        # In a list the reference itself travels: the pictures stay where they are until the learner wants them.
        if not await _value(actor.submit.remote(task, [answer.views], verdict, bare(answer.group.question))):
            self.counts["update_refused"] += 1
            return False
        return True


def as_experience(answer: Answer, user: str | None) -> Experience:
    """What is worth keeping of an answer, before redaction; ``user`` is a pseudonym.

    Priority .5 (1 - confidence) + .25, of cold starts .9: what the policy was unsure of is looked at first.
    """
    verdict: Verdict = answer.verdict
    images = [_unnamed(image) for image in answer.winner.images]
    return Experience(
        id=answer.experience_id or "",
        question=bare(answer.group.question),
        trajectory=answer.winner.model_copy(update={"images": images}),
        verdict=verdict,
        policy_version=answer.group.policy_version,
        created_at=time.time(),
        user=user,
        priority=COLD_PRIORITY if answer.cold_start else 0.5 * (1 - verdict.confidence) + 0.25,
        cold_start=answer.cold_start,
    )


def bare(question: Question) -> Question:
    """The question without the caller's data URLs: its pictures are called as they are kept beside an experience."""
    media = [m.model_copy(update={"uri": f"memory:{m.id}"}) if m.uri.startswith("data:") else m for m in question.media]
    return question.model_copy(update={"media": media})


def _unnamed(image: ImageView) -> ImageView:
    return image.model_copy(update={"uri": ""}) if image.uri.startswith("data:") else image


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
