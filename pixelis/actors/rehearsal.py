"""Draws experiences that updates imitate once more, so that new traffic does not undo what earlier traffic taught."""

from __future__ import annotations

import asyncio
import io
import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping

import numpy as np
from PIL import Image
from ray.exceptions import RayError

from pixelis.actors.memory import Memory
from pixelis.actors.update_pictures import UpdatePictures
from pixelis.actors.update_queue import QueuedTask
from pixelis.config import EvolutionConfig
from pixelis.errors import PixelisError
from pixelis.evolution.shares import most_tasks
from pixelis.records import Experience, UpdateTask
from pixelis.rewards.vote import called_wrong

log = logging.getLogger(__name__)
SURPLUS = 2
"""Experiences drawn for each that updates need: some have no pictures, or too many are of one user."""


class Rehearsal:
    """``evolution.rehearse`` experiences of the memory for each update, of which an update was made before.

    They are drawn ahead, by priority and success, while the learner computes: no update waits for them.
    """

    def __init__(self, config: EvolutionConfig, memory: Memory | None, pictures: UpdatePictures):
        self.count = config.rehearse if memory is not None else 0
        self.memory, self.pictures = memory, pictures
        self.items: list[QueuedTask] = []
        self.drawing: asyncio.Task[None] | None = None

    def prepare(self, cap: float) -> None:
        """Draw for the next update, in the background; no user has more than the share ``cap`` of what is drawn."""
        if self.count and not self.items and (self.drawing is None or self.drawing.done()):
            self.drawing = asyncio.create_task(self._draw(cap))

    def take(self, withdrawn: Container[int], forgotten: Container[str]) -> list[QueuedTask]:
        """What was drawn by now, each with one trajectory and without an advantage.

        Not what ``withdrawn`` versions answered, nor the experiences ``forgotten``, which the memory may still have had.
        """
        items, self.items = self.items, []
        current = [item for item in items if item.task.trajectories[0].policy_version not in withdrawn]
        return [item for item in current if item.task.experience_id not in forgotten]

    def forget(self, experience_ids: Iterable[str]) -> None:
        """Drop these experiences: they are deleted, or feedback calls them wrong. A running draw may have them: it is ended."""
        if self.drawing is not None:
            self.drawing.cancel()
        unwanted = set(experience_ids)
        self.items = [item for item in self.items if item.task.experience_id not in unwanted]

    async def _draw(self, cap: float) -> None:
        assert self.memory is not None
        try:
            experiences = await self.memory.sample(SURPLUS * self.count, status="processed")
            chosen = within_share([e for e in experiences if usable(e)], self.count, cap)
            stored = await asyncio.gather(*(self.memory.pictures(e.id) for e in chosen))
            self.items = await asyncio.to_thread(self._load, list(zip(chosen, stored, strict=True)))
        except (PixelisError, RayError) as error:  # the update goes on without
            log.warning("nothing is rehearsed: %s", error)

    def _load(self, pairs: list[tuple[Experience, Mapping[str, bytes]]]) -> list[QueuedTask]:
        items = []
        for experience, stored in pairs:
            images = [image.id for image in experience.trajectory.images]
            if not all(id in stored for id in images):
                continue
            views = {experience.trajectory.id: [_decode(stored[id]) for id in images]}
            items.append(QueuedTask(as_task(experience), self.pictures.hold(views), ""))
        return items


def usable(experience: Experience) -> bool:
    """Whether an experience can be imitated: its answer is elected, not called wrong since, and its tokens were not redacted."""
    turns = experience.trajectory.turns
    return experience.verdict.answer is not None and not called_wrong(experience) and all(turn.tokens for turn in turns)


def within_share(experiences: Iterable[Experience], most: int, cap: float) -> list[Experience]:
    """The first ``most`` experiences of which no user has more than the share ``cap``, 0..1, of ``most``."""
    counts, chosen = Counter[str | None](), list[Experience]()
    for experience in experiences:
        if len(chosen) < most and counts[experience.user] < most_tasks(cap, most):
            counts[experience.user] += 1
            chosen.append(experience)
    return chosen


def as_task(experience: Experience) -> UpdateTask:
    """The task of the elected trajectory alone; without an advantage, because its log-probabilities are those of old weights."""
    trajectory = experience.trajectory.model_copy(update={"advantage": None})
    return UpdateTask(
        question_id=experience.question.id,
        trajectories=[trajectory],
        pseudo_label=experience.verdict.answer or "",
        confidence=experience.verdict.confidence,
        created_at=experience.created_at,
        experience_id=experience.id,
        user=experience.user or "",
    )


def _decode(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))
