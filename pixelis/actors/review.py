"""The Evolution actor's side of human review: queues updates and shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pixelis.evolution.privacy import clean_png, redact_experience
from pixelis.evolution.review_queue import Review, ReviewQueue, State
from pixelis.evolution.vote import agrees
from pixelis.records import Experience, Question, Trajectory, UpdateTask, Verdict

LEAST = 2
"""Trajectories without which there is nothing to compare, so nothing to learn."""


class Reviewing:
    """The durable queue without blocking the event loop; at most ``limit`` updates wait in it."""

    def __init__(self, queue: ReviewQueue, limit: int):
        self.queue, self.limit = queue, limit

    async def full(self) -> bool:
        """Whether no more may wait."""
        return await asyncio.to_thread(self.queue.waiting) >= self.limit

    async def keep(
        self, task: UpdateTask, verdict: Verdict, question: Question, views: Mapping[str, Sequence[np.ndarray]]
    ) -> bool:
        """Keep an update until somebody decides; False when nothing of it may be kept.

        Stored text is redacted, and tokens that spell what was redacted are gone with it: such a trajectory is not learnt from.
        """
        return await asyncio.to_thread(self._keep, task, verdict, question, views)

    def _keep(self, task: UpdateTask, verdict: Verdict, question: Question, views: Mapping[str, Sequence[np.ndarray]]) -> bool:
        def clean(trajectory: Trajectory) -> Experience:
            version = trajectory.policy_version
            known = Experience(question=question, trajectory=trajectory, verdict=verdict, policy_version=version, created_at=0.0)
            return redact_experience(known)

        cleaned = [clean(trajectory) for trajectory in task.trajectories]
        able = [
            known.trajectory
            for known, was in zip(cleaned, task.trajectories, strict=True)
            if known.trajectory.token_ids() == was.token_ids()
        ]
        if len(able) < LEAST:
            return False
        kept = task.model_copy(update={"trajectories": able, "pseudo_label": cleaned[0].verdict.answer or task.pseudo_label})
        seen = shown(kept)
        pictures = {image.id: clean_png(view) for image, view in zip(seen.images, views[seen.id], strict=True)}
        self.queue.put(kept, cleaned[0].verdict, cleaned[0].question, pictures, {t.id: views[t.id] for t in able})
        return True

    async def show(self, state: State | None, limit: int) -> list[dict[str, Any]]:
        """Updates in this state, without tokens and pictures."""
        return [_for_people(review) for review in await asyncio.to_thread(self.queue.list, state, limit)]

    async def show_one(self, id: str) -> dict[str, Any] | None:
        """One of them, with ``pictures``: PNG bytes by image id of its trajectory; None for an unknown id."""
        found = await asyncio.to_thread(self.queue.get, id)
        if found is None:
            return None
        return {**_for_people(found), "pictures": await asyncio.to_thread(self.queue.pictures, id)}

    async def decide(
        self, id: str, approve: bool, by: str, comment: str, answer: str | None
    ) -> tuple[UpdateTask, dict[str, list[np.ndarray]]] | None:
        """Decide once; the task to learn from and its views, or None. Raises BadInput as ``ReviewQueue.decide``."""
        task = await asyncio.to_thread(self.queue.decide, id, "approved" if approve else "rejected", by, comment, answer)
        return None if task is None else (task, await asyncio.to_thread(self.queue.views, id))

    async def approved(self) -> list[tuple[UpdateTask, dict[str, list[np.ndarray]]]]:
        """What was approved and not learnt from yet, with its views, the first decided first."""
        return await asyncio.to_thread(self._approved)

    def _approved(self) -> list[tuple[UpdateTask, dict[str, list[np.ndarray]]]]:
        tasks = [self.queue.task(id) for id in self.queue.approved()]
        return [(task, self.queue.views(task.id)) for task in tasks if task is not None]

    async def done(self, tasks: Sequence[UpdateTask]) -> None:
        """These were learnt from or given up; those that were no reviews do not matter."""
        await asyncio.to_thread(self.queue.done, [task.id for task in tasks])

    async def due(self, now: float, after_s: float) -> Sequence[str]:
        """Ids of what has waited ``after_s`` seconds."""
        return await asyncio.to_thread(self.queue.due, now, after_s)

    async def forget(self, experience_ids: Sequence[str]) -> int:
        """Remove the reviews of these experiences; returns how many."""
        return await asyncio.to_thread(self.queue.forget, experience_ids)

    async def stats(self) -> dict[str, float]:
        """Counts by state."""
        return await asyncio.to_thread(self.queue.stats)


def shown(task: UpdateTask) -> Trajectory:
    """The trajectory that stands for a task: the first that gave its label."""
    return next((t for t in task.trajectories if agrees(t.answer, task.pseudo_label)), task.trajectories[0])


def _for_people(review: Review) -> dict[str, Any]:
    """What was asked, how it was voted, what would be learnt, and one trajectory without its tokens."""
    seen = shown(review.task)
    light = seen.model_copy(update={"turns": [turn.model_copy(update={"tokens": [], "log_probs": []}) for turn in seen.turns]})
    return {
        **review.model_dump(mode="json", exclude={"task"}),
        "experience_id": review.task.experience_id,
        "pseudo_label": review.task.pseudo_label,
        "confidence": review.task.confidence,
        "trajectory": light.model_dump(mode="json"),
    }
