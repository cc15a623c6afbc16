"""Learns from users' words: asks the served policy again with them, and makes update tasks of its clear votes."""

from __future__ import annotations

import asyncio
import base64
import io
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import ray
from PIL import Image

from pixelis.actors.after_episode import log_failure
from pixelis.actors.group_views import GroupViews
from pixelis.actors.memory import Memory
from pixelis.config import Config
from pixelis.dialogue.session import BATCH_PRIORITY, SamplingParams
from pixelis.evolution.updates import make_task
from pixelis.evolution.words import original, prompt_of, told, transplant
from pixelis.records import Experience
from pixelis.rewards.vote import TOLD
from pixelis.serve.agent_types import AgentQuery, Answer

Ask = Callable[[AgentQuery], Awaitable[Answer]]
Tell = Callable[..., Awaitable[Any]]


class Words:
    """``tell`` calls Evolution. ``counts`` gets the outcomes: ``words_sent``, ``words_unclear`` or ``words_failed``."""

    def __init__(self, config: Config, ask: Ask, memory: Memory, tell: Tell, counts: Counter[str]):
        self.config, self.ask, self.memory = config, ask, memory
        self.tell, self.counts = tell, counts

    async def learn(self, id: str, experience: Experience, words: str, voter: str) -> None:
        """Send the task ``id`` of ``voter``'s redacted words, if the policy votes clearly. Never raises."""
        try:
            outcome = "words_sent" if await self._teach(id, experience, words, voter) else "words_unclear"
        except Exception as error:
            outcome = "words_failed"
            log_failure("nothing is learnt from a user's words", error)
        self.counts[outcome] += 1

    async def _teach(self, id: str, experience: Experience, words: str, voter: str) -> bool:
        """False if there is nothing to learn, or if Evolution refuses it, which Evolution counts by cause."""
        c, student, pngs = self.config, experience.trajectory, await self.memory.pictures(experience.id)
        # An answer that was not to be learnt from is stored without its pictures as they were sent.
        sent = [original(f"img{number}") for number in range(len(experience.question.media))]
        names = [name for turn in prompt_of(student) for name in turn.images]
        if experience.verdict.answer is None or not sent or not pngs.keys() >= {*sent, *names}:
            return False
        question, default = told(experience, words), c.serve.sampling
        limits = default.temperature, default.top_p, c.dialogue.max_turn_tokens
        query = AgentQuery(
            question.question,
            ["data:image/png;base64," + base64.b64encode(pngs[name]).decode("ascii") for name in sent],
            c.serve.samples,
            SamplingParams(*limits, secrets.randbits(31), BATCH_PRIORITY),
            max_turns=c.dialogue.max_turns_test,
            learn=False,
            remember=False,
            history=question.history,
        )
        answer = await self.ask(query)
        task = make_task(answer.group, answer.verdict, c.evolution, c.rewards, user=voter)
        if task is None:
            return False
        views = await asyncio.to_thread(lambda: [_pixels(pngs[name]) for name in names])
        taught = await answer.views.get()
        pairs = [transplant(student, views, t, taught[t.id]) for t in task.trajectories]
        moved = [pair for pair in pairs if pair is not None]
        if not moved:
            return False
        # Not as ``experience_id``: what is said of that answer is not said of this label.
        details = {
            "id": id,
            "trajectories": [t for t, _ in moved],
            "experiences": {student.id: experience.id},
        }
        held = GroupViews(ray.put({t.id: seen for t, seen in moved}))
        verdict = answer.verdict.model_copy(update={"reason": TOLD})
        task = task.model_copy(update=details)
        return bool(await self.tell("submit", task, held, verdict, experience.question))


def _pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
