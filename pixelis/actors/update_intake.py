"""Decides what becomes of an update task: it is dropped, held out for the canary, reviewed, or queued for the learner."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from pixelis.actors.group_views import GroupViews
from pixelis.actors.promotion import Promotion
from pixelis.actors.review import AsyncReviewQueue
from pixelis.actors.update_pictures import Picture, PictureViews, UpdatePictures, fetch
from pixelis.actors.update_queue import QueuedTask, UpdateQueue, prompt_key
from pixelis.actors.update_scoring import UpdateScoring
from pixelis.config import Config
from pixelis.evolution.collapse import Collapse
from pixelis.evolution.gate import ClearShare, needs_review
from pixelis.evolution.shares import NearQuestions, Source
from pixelis.evolution.traffic_questions import TrafficQuestions
from pixelis.evolution.vote import contradicts
from pixelis.operations.pixel_budget import shrink
from pixelis.records import Feedback, Question, UpdateTask, Verdict

REMEMBERED = 100_000
"""Deletions and feedback remembered for tasks that are still on their way, at most; the latest."""
LONGEST = 1600
"""Longer side at most of a picture that is held out for the canary, which stores and keeps it in memory."""


class UpdateIntake:
    """Admits tasks to the queue, whose ``counts`` get the outcomes. ``pictures`` are those of the canary, too.

    While ``paused`` only approved tasks are queued; while ``draining`` or when ``stopped`` none are.
    """

    def __init__(
        self,
        config: Config,
        queue: UpdateQueue,
        promotion: Promotion,
        traffic: TrafficQuestions,
        review_queue: AsyncReviewQueue,
        scoring: UpdateScoring,
        pictures: UpdatePictures,
    ):
        self.settings, self.queue, self.promotion, self.review_queue = config.evolution, queue, promotion, review_queue
        self.stores_pictures = config.memory.enabled and config.memory.pictures
        self.retention_s = config.memory.retention_days * 86_400
        self.scoring, self.pictures, self.counts = scoring, pictures, queue.counts
        self.traffic, self.questions = traffic, NearQuestions()
        self.traffic.load(self.questions.group)
        self.collapse = Collapse(config.evolution.vote)
        self.clear = ClearShare(config.evolution.vote)
        self.forgotten: dict[str, None] = {}
        """Ids of deleted experiences, in order."""
        self.feedback: dict[str, Feedback] = {}
        """The last feedback by id of the experience."""
        self.unusable = 0
        """Tasks in a row from which nothing can be learnt."""
        self.unclear = 0
        """Tasks in a row of users whose votes are rarely clear."""
        self.paused = self.draining = self.stopped = False

    async def submit(
        self,
        task: UpdateTask,
        views: GroupViews,
        verdict: Verdict | None,
        question: Question | None,
        step: int | None,
        originals: Mapping[str, ray.ObjectRef] | None = None,
        unclear: int = 0,
    ) -> bool:
        """See ``Evolution.submit``. ``step`` is the update that the learner makes next, None without a learner."""
        enough = verdict is None or self.clear.add(task.user, unclear)
        self.unclear = 0 if enough else self.unclear + 1
        if cause := self._refusal(task) or ("" if enough else "unclear"):
            self.counts[cause] += 1
            if not enough:
                await self._withdraw("unclear", lambda item: item.task.user == task.user and not item.approved)
            return False
        try:
            arrays = await views.get()
        except RayError:
            self.counts["lost"] += 1
            return False
        if verdict is not None and self.collapse.add(verdict, prompt_key(task, question, arrays)):
            self.counts["collapsed"] += 1
            return False
        task = await self.scoring.score(task, views, question, step)
        if not self.queue.usable(task):
            self.counts["unusable"] += 1
            self.unusable += 1
            return False
        self.unusable = 0
        pictures = await self._hold(arrays)
        if cause := self._refusal(task):  # the state may have changed since
            self.counts[cause] += 1
            return False
        self.counts["received"] += 1
        group = self._question_group(task, question, arrays)
        if question is not None and await self._hold_out(task, question, group, originals or {}):
            return True
        if verdict is None or question is None or not needs_review(task.id, self.settings) or await self.review_queue.full():
            return await self._push(task, pictures, group)
        stored = await self.review_queue.put(task, verdict, question, arrays)
        self.counts["reviewed" if stored else "private"] += 1
        if task.experience_id in self.forgotten:  # forgotten while it was being stored
            await self.review_queue.forget([task.experience_id])
        if feedback := self.feedback.get(task.experience_id):
            await self.review_queue.dispute(task.experience_id, feedback)
        return stored

    async def approve(self, task: UpdateTask, views: dict[str, Any], question: Question) -> bool:
        """Queue a task that a reviewer approved; False if nothing can be learnt from it any more."""
        task = await self.scoring.score(task, views, None, None)
        pictures = await self._hold(views)
        group = self._question_group(task, question, views)
        queued = self.queue.usable(task) and await self._push(task, pictures, group, approved=True)
        if not queued:
            await self.review_queue.done([task])
        return queued

    async def disown(self, experience_id: str, feedback: Feedback) -> None:
        """Remove the tasks of an experience whose label the feedback calls wrong, also those submitted later.

        Those that wait for review are left to a person.
        """

        def wrong(item: QueuedTask) -> bool:
            return item.task.experience_id == experience_id and contradicts(feedback, item.task.pseudo_label)

        if feedback.correct is None and feedback.answer is None:
            return
        self.feedback.pop(experience_id, None)  # the latest comes last
        _remember(self.feedback, {experience_id: feedback})
        held_out = next((item for item in self.traffic.items if item.experience_id == experience_id), None)
        if held_out is not None and contradicts(feedback, (held_out.question.answers or [""])[0]):
            self.traffic.forget([experience_id])
            await asyncio.to_thread(self.traffic.save)
        await self._withdraw("disowned", wrong)
        await self.review_queue.dispute(experience_id, feedback)

    async def forget(self, experience_ids: list[str]) -> int:
        """Drop the tasks and reviews of these experiences, also those submitted later; returns the number dropped now."""
        ids = set(experience_ids)
        _remember(self.forgotten, dict.fromkeys(ids - {""}))
        async with self.queue.changed:
            removed = self.queue.remove(lambda item: item.task.experience_id in ids)
        held_out = self.traffic.forget(experience_ids)
        await asyncio.to_thread(self.traffic.save)
        return len(removed) + held_out + await self.review_queue.forget(experience_ids)

    async def expire(self) -> None:
        """Remove the questions held out longer than ``memory.retention_days``."""
        if self.traffic.expire(time.time() - self.retention_s):
            await asyncio.to_thread(self.traffic.save)

    async def _withdraw(self, cause: str, chosen: Callable[[QueuedTask], bool]) -> None:
        """Remove the chosen tasks from the queue and count them under ``cause``."""
        async with self.queue.changed:
            removed = self.queue.remove(chosen)
            self.counts[cause] += len(removed)
        await self.review_queue.done(removed)

    def _refusal(self, task: UpdateTask, approved: bool = False) -> str:
        """Why a task must be dropped, empty when it need not. An approved task is queued even while paused."""
        if self.draining or self.stopped or task.experience_id in self.forgotten:
            return "refused"
        if self.paused and not approved:
            return "paused"
        feedback = self.feedback.get(task.experience_id)
        if feedback is not None and not approved and contradicts(feedback, task.pseudo_label):
            return "disowned"
        return "withdrawn" if task.trajectories[0].policy_version in self.promotion.withdrawn else ""

    def _question_group(self, task: UpdateTask, question: Question | None, arrays: dict[str, Any]) -> str:
        """The name of the task's group of near-identical questions; without the question, of its id."""
        if question is None:
            return task.question_id
        return self.questions.group(question.conversation, next(iter(arrays.get(task.trajectories[0].id, [])), None))

    async def _hold(self, arrays: dict[str, Any]) -> PictureViews:
        return await asyncio.to_thread(self.pictures.hold, arrays)

    async def _hold_out(self, task: UpdateTask, question: Question, group: str, originals: Mapping[str, ray.ObjectRef]) -> bool:
        """Hold a task out for the canary with the question's pictures, not the policy's views of them; True if it was.

        Questions about clips, and those whose pictures are lost, are not held out; none is where the memory stores no pictures.
        """
        canary = self.promotion.canary
        known = all(media.kind == "image" and media.id in originals for media in question.media)
        source, cap = Source(task.user, group), self.queue.shares.user_cap(time.monotonic())
        if canary is None or not (known and self.stores_pictures) or not self.traffic.wants(task, question, source, cap):
            return False
        try:
            arrays = await asyncio.gather(*(originals[media.id] for media in question.media))
        except RayError:
            return False
        pictures = await asyncio.to_thread(self._shrunk, dict(zip((m.id for m in question.media), arrays, strict=True)))
        (own,) = await asyncio.to_thread(fetch, [{task.id: [picture.ref for picture in pictures.values()]}])
        if self._refusal(task) or not self.traffic.wants(task, question, source, cap):  # deleted or called wrong since
            return False
        self.traffic.add(task, question, source, dict(zip(pictures, own[task.id], strict=True)))
        canary.keep(task.id, pictures)
        self.counts["held_out"] += 1
        await asyncio.to_thread(self.traffic.save)
        return True

    def _shrunk(self, originals: Mapping[str, np.ndarray]) -> dict[str, Picture]:
        return {id: self.pictures.add(shrink(picture, LONGEST)) for id, picture in originals.items()}

    async def _push(self, task: UpdateTask, views: PictureViews, question: str, approved: bool = False) -> bool:
        async with self.queue.changed:
            if cause := self._refusal(task, approved):  # the state may have changed since
                self.counts[cause] += 1
                return False
            self.queue.push(QueuedTask(task, views, question, approved))
            self.queue.changed.notify_all()
            return True


def _remember(memory: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Add items; the oldest beyond REMEMBERED are dropped."""
    memory.update(new)
    for name in list(itertools.islice(memory, max(0, len(memory) - REMEMBERED))):
        del memory[name]
