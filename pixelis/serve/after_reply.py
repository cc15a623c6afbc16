"""Stores the experience of an answer, credits neighbours, and makes update tasks of confident verdicts."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from ray.actor import ActorHandle

from pixelis.actors.after_episode import YES, AfterEpisode, Stored
from pixelis.actors.memory import UNAVAILABLE
from pixelis.config import Config
from pixelis.dialogue.session import BATCH_PRIORITY, SamplingParams
from pixelis.errors import BadInput
from pixelis.evolution import privacy
from pixelis.evolution.updates import make_task, priority
from pixelis.evolution.words import corrected_question, original, transplant
from pixelis.operations.image import data_url
from pixelis.records import Experience, Feedback, Verdict, new_id
from pixelis.rewards.vote import TOLD
from pixelis.serve.agent_types import AgentQuery, Answer
from pixelis.serve.retrieval import Lookup, Retrieval

COLD_PRIORITY = 0.9
START_DELAY_S = 0.05
"""Delay of other work, which holds the interpreter, until the reply is encoded and sent."""


class AfterReply(AfterEpisode):
    """Stores an answer's experience, for which its reply waits, and then does the rest of the work.

    Handles at most ``evolution.queue`` answers at once and never fails a reply. ``ask`` asks the policy again
    with a user's words.
    """

    def __init__(
        self,
        config: Config,
        retrieval: Retrieval,
        evolution: Callable[[], Awaitable[ActorHandle]] | None,
        counts: Counter[str],
        ask: Callable[[AgentQuery], Awaitable[Answer]],
    ):
        super().__init__(config, evolution, counts)
        self.retrieval, self.ask = retrieval, ask
        self.learns_words = self.learns and config.evolution.words

    async def remember(self, answer: Answer, query: AgentQuery, lookup: Lookup) -> None:
        """Start this work and wait until the experience is on disk, at most ``memory.write_timeout_s``.

        Sets ``experience_id`` and ``remembered``.
        """
        c = self.config
        remember = self.retrieval.writes and bool(query.remember)
        learn = self.learns and query.learn and not answer.cold_start
        if not (remember or learn):
            return
        if len(self.tasks) >= c.evolution.queue:
            self.counts["follow_skipped"] += 1
            answer.remembered = "queue full" if remember else "no"
            return
        id, later = query.experience_id or new_id("exp"), query.remember == "later"
        storing = asyncio.create_task(
            self._remember(id, answer, query, lookup, remember, START_DELAY_S if later else 0.0)
        )
        self.start(id, self._follow(id, answer, query.voter, lookup, storing, learn))
        if later:
            answer.remembered = "later"
        elif remember:
            await asyncio.wait([storing], timeout=c.memory.write_timeout_s)
            answer.remembered = storing.result().outcome if storing.done() else UNAVAILABLE
            answer.experience_id = id if answer.remembered == YES else None
            self.counts["not_remembered"] += answer.experience_id is None

    async def _remember(
        self, id: str, answer: Answer, query: AgentQuery, lookup: Lookup, remember: bool, delay_s: float
    ) -> Stored:
        await asyncio.sleep(delay_s)
        keeps_originals = self.learns_words and query.learn and not query.clips
        stored = await self.store(
            lambda: as_experience(id, answer, query),
            answer.winner,
            answer.views,
            self.retrieval.memory if remember else None,
            lookup.vector,
            answer.originals if keeps_originals else {},
        )
        answer.pngs = dict(stored.pngs)
        return stored

    async def _follow(
        self,
        id: str,
        answer: Answer,
        voter: str,
        lookup: Lookup,
        storing: asyncio.Task[Stored],
        learn: bool,
    ) -> None:
        redacted, outcome, _ = await storing
        await asyncio.sleep(START_DELAY_S)
        risk = await self.in_thread(lambda: privacy.risk(answer.group.question.conversation))
        self.counts[f"privacy_risk_{risk.level}"] += 1
        if outcome == YES:
            credit = self._credit_neighbours(answer.verdict, lookup.retrieval_id)
            await self.count("neighbours_credited", credit)
        # What cannot be stored is not learnt from: nobody could find or correct it
        if learn and redacted is not None:
            await self.count("update_sent", self._submit_update(id, answer, redacted, voter))

    async def _credit_neighbours(self, verdict: Verdict, retrieval_id: str) -> bool:
        """Tell the memory which neighbours voted for the verdict's answer; False without any."""
        agreed = [v.id for v in verdict.votes if v.source == "neighbour" and v.elected]
        if agreed and self.retrieval.memory is not None:
            await self.retrieval.memory.succeeded(retrieval_id, agreed)
        return bool(agreed)

    async def feedback(
        self, experience_id: str, feedback: Feedback, by: str = "client", voter: str = ""
    ) -> Experience:
        """Redact feedback, store it with its experience and send it to Evolution.

        Its comment is learnt for ``voter``. Raises BadInput without a memory and for an unknown id, InfraFailure.
        """
        if not self.retrieval.writes or self.retrieval.memory is None:
            raise BadInput("this service stores nothing, so it accepts no feedback", code="no_memory")
        redacted = privacy.redact_record(feedback)
        redacted = redacted.model_copy(update={"created_at": redacted.created_at or time.time()})
        experience = await self.retrieval.memory.feedback(experience_id, redacted)
        self.counts["feedback"] += 1
        if self.evolution is not None:
            sending = self.tell_evolution("feedback", experience_id, redacted, by)
            self.start(new_id("feedback"), self.count("feedback_sent", sending))
        if self.learns_words and (words := redacted.comment.strip()):
            # The same for a repetition: Evolution takes it once.
            id = f"task_{hashlib.sha256(f'{experience_id} {words}'.encode()).hexdigest()[:16]}"
            if len(self.tasks) >= self.config.evolution.queue:
                self.counts["follow_skipped"] += 1
            elif id not in self.tasks:
                learning = self._learn_words(id, experience, words, voter)
                self.start(id, self.count("words_sent", learning))
        return experience

    async def _learn_words(self, id: str, experience: Experience, words: str, voter: str) -> bool:
        """Ask the policy again with a user's words, and submit what it answers clearly as the task ``id``.

        False if nothing can be learnt, counted as ``words_unclear``, and if Evolution refuses the task.
        """
        c, student = self.config, experience.trajectory
        answer = await self._ask_again(experience, words)
        task = make_task(answer.group, answer.verdict, c.evolution, c.rewards, user=voter) if answer else None
        moved = [transplant(student, teacher) for teacher in task.trajectories] if task else []
        trajectories = [trajectory for trajectory in moved if trajectory is not None]
        if answer is None or task is None or not trajectories:
            self.counts["words_unclear"] += 1
            return False
        # No ``experience_id``: what is said of that answer is not said of this label.
        details = {"id": id, "trajectories": trajectories, "experiences": {student.id: experience.id}}
        verdict = answer.verdict.model_copy(update={"reason": TOLD})
        task = task.model_copy(update=details)
        return bool(await self.tell_evolution("submit", task, answer.views, verdict, experience.question))

    async def _ask_again(self, experience: Experience, words: str) -> Answer | None:
        """The policy's answer with a user's words; None if it had none, or may not learn from the request."""
        assert self.retrieval.memory is not None
        c, question = self.config, corrected_question(experience, words)
        pngs = await self.retrieval.memory.pictures(experience.id)
        sent = [original(media.id) for media in question.media]
        if experience.verdict.answer is None or not sent or not pngs.keys() >= set(sent):
            return None
        default = c.serve.sampling
        query = AgentQuery(
            question.question,
            [data_url(pngs[name]) for name in sent],
            c.serve.samples,
            SamplingParams(
                default.temperature, default.top_p, c.dialogue.max_turn_tokens, priority=BATCH_PRIORITY
            ),
            max_turns=c.dialogue.max_turns_test,
            learn=False,
            remember=False,
            history=question.history,
        )
        return await self.ask(query)

    async def _submit_update(self, id: str, answer: Answer, redacted: Experience, voter: str) -> bool:
        """False if the gate or Evolution refuses the task."""
        c, verdict = self.config, answer.verdict
        task = await self.in_thread(
            lambda: make_task(answer.group, verdict, c.evolution, c.rewards, experience_id=id, user=voter)
        )
        if task is None:
            self.gated(voter)
            return False
        return await self.send(task, answer.views, redacted.verdict, redacted.question, answer.originals)


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
        priority=COLD_PRIORITY if answer.cold_start else priority(answer.verdict),
        cold_start=answer.cold_start,
        response=query.response(answer) if query.response is not None else None,
    )
