"""The Evolution actor's side of human review: redacts updates, queues them, and shows them to reviewers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.config import Config
from pixelis.evolution.privacy import clean_png, redact, redact_record
from pixelis.evolution.review_queue import Review, ReviewQueue, State, without_tokens
from pixelis.evolution.vote import agrees
from pixelis.records import Feedback, Question, Trajectory, UpdateTask, Verdict

MIN_TRAJECTORIES = 2
"""A group of fewer trajectories has no advantages."""

MAX_WAITING = 1000
"""Updates that may wait for review; further ones are applied without one."""
Approved = tuple[UpdateTask, dict[str, list[np.ndarray]], Question]
"""A task, the views of its trajectories by trajectory id, and its stored question."""


class AsyncReviewQueue:
    """The review queue of a run without blocking the event loop; at most MAX_WAITING updates wait in it."""

    def __init__(self, config: Config):
        self.queue = ReviewQueue(Path(config.run.dir) / "review.db", config.rewards)
        self.deciding = asyncio.Lock()

    async def full(self) -> bool:
        """True when no more updates may wait."""
        return await asyncio.to_thread(self.queue.waiting) >= MAX_WAITING

    async def put(
        self, task: UpdateTask, verdict: Verdict, question: Question, views: Mapping[str, Sequence[np.ndarray]]
    ) -> bool:
        """Store an update until it is decided; False when too little of it may be stored.

        Stored text is redacted. Trajectories whose tokens spell redacted text are left out, since they cannot be learnt from.
        """
        return await asyncio.to_thread(self._put, task, verdict, question, views)

    def _put(self, task: UpdateTask, verdict: Verdict, question: Question, views: Mapping[str, Sequence[np.ndarray]]) -> bool:
        redacted = [redact_record(trajectory) for trajectory in task.trajectories]
        usable = [
            trajectory
            for trajectory, original in zip(redacted, task.trajectories, strict=True)
            if trajectory.token_ids() == original.token_ids()
        ]
        if len(usable) < MIN_TRAJECTORIES:
            return False
        task = task.model_copy(update={"trajectories": usable, "pseudo_label": redact(task.pseudo_label)})
        shown = _representative(task)
        pictures = {image.id: clean_png(view) for image, view in zip(shown.images, views[shown.id], strict=True)}
        self.queue.put(task, redact_record(verdict), redact_record(question), pictures, {t.id: views[t.id] for t in usable})
        return True

    async def show(self, state: State | None, limit: int) -> list[dict[str, Any]]:
        """Updates in this state, without tokens and pictures."""
        return [_shown(review) for review in await asyncio.to_thread(self.queue.reviews, state, limit)]

    async def show_one(self, id: str) -> dict[str, Any] | None:
        """An update with ``pictures``, PNG bytes by image id of its trajectory; None for an unknown id."""
        review = await asyncio.to_thread(self.queue.get, id)
        if review is None:
            return None
        return {**_shown(review), "pictures": await asyncio.to_thread(self.queue.pictures, id)}

    async def dispute(self, experience_id: str, feedback: Feedback) -> int:
        """See ``ReviewQueue.dispute``."""
        return await asyncio.to_thread(self.queue.dispute, experience_id, feedback)

    async def decide(self, id: str, approve: bool, by: str, comment: str, answer: str | None) -> tuple[bool, Approved | None]:
        """Decide once; whether this decided it, and the task to learn from. Raises BadInput as ``ReviewQueue.decide``."""
        async with self.deciding:
            review = await asyncio.to_thread(self.queue.get, id)
            waited = review is not None and review.state == "waiting"
            task = await asyncio.to_thread(self.queue.decide, id, "approved" if approve else "rejected", by, comment, answer)
        if task is None or review is None:
            return waited, None
        return waited, (task, await asyncio.to_thread(self.queue.views, id), review.question)

    async def approved(self) -> list[Approved]:
        """Approved tasks that were not learnt from yet, in the order of decisions."""

        def read() -> list[Approved]:
            rows = [(self.queue.task(id), self.queue.get(id)) for id in self.queue.approved()]
            return [(task, self.queue.views(task.id), row.question) for task, row in rows if task is not None and row is not None]

        return await asyncio.to_thread(read)

    async def done(self, tasks: Sequence[UpdateTask]) -> None:
        """Remove tasks that were learnt from or given up; tasks that were not reviewed are ignored."""
        if tasks:
            await asyncio.to_thread(self.queue.done, [task.id for task in tasks])

    async def due(self, now: float, after_s: float) -> list[str]:
        """Ids of the updates that have waited ``after_s`` seconds."""
        return await asyncio.to_thread(self.queue.due, now, after_s)

    async def forget(self, experience_ids: Sequence[str]) -> int:
        """Remove the reviews of these experiences; returns their number."""
        return await asyncio.to_thread(self.queue.forget, experience_ids)

    async def stats(self) -> dict[str, float]:
        """Counts by state."""
        return await asyncio.to_thread(self.queue.stats)


def _representative(task: UpdateTask) -> Trajectory:
    """The trajectory that stands for a task: the first that gave its label."""
    return next((t for t in task.trajectories if agrees(t.answer, task.pseudo_label)), task.trajectories[0])


def _shown(review: Review) -> dict[str, Any]:
    """Question, vote, label and one trajectory without its tokens, as JSON takes them."""
    return {
        **review.model_dump(mode="json", exclude={"task"}),
        "experience_id": review.task.experience_id,
        "pseudo_label": review.task.pseudo_label,
        "confidence": review.task.confidence,
        "trajectory": without_tokens(_representative(review.task)).model_dump(mode="json"),
    }
