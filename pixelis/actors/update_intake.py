"""Decides what becomes of an update task: dropped, held out for the canary, reviewed, or queued."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import ray
from ray.exceptions import RayError

from pixelis.actors.cluster import actor_handle, unwrap_ray_error
from pixelis.actors.evolution_monitor import log_failures
from pixelis.actors.group_views import GroupViews, PictureViews, UpdatePictures, Views, fetch
from pixelis.actors.promotion import Promotion
from pixelis.actors.update_queue import QueuedTask, UpdateQueue
from pixelis.config import Config
from pixelis.errors import InfraFailure
from pixelis.evolution.gate import ClearShare, needs_review
from pixelis.evolution.privacy import clean_png, redact, redact_record
from pixelis.evolution.review_queue import ReviewQueue
from pixelis.evolution.shares import NearQuestions, Source
from pixelis.evolution.traffic_questions import TrafficQuestions
from pixelis.evolution.updates import as_question_group, speaking_for
from pixelis.operations.pixel_budget import shrink
from pixelis.records import Feedback, Question, Trajectory, UpdateTask, Verdict
from pixelis.rewards.vote import REWARDED, TOLD, agrees, contradicts

REMEMBERED = 100_000
"""Latest deletions and feedback remembered for tasks that are still on their way."""
LONGEST = 1600
"""Longest side of a picture that is held out for the canary, which keeps it in memory."""
MAX_WAITING = 1000
"""Updates that may wait for review; further ones are applied without one."""
MIN_TRAJECTORIES = 2
"""A group of fewer trajectories has no advantages."""
log = logging.getLogger(__name__)


class UpdateIntake:
    """Admits tasks to the queue, whose ``counts`` get the outcomes.

    While ``paused`` only approved tasks are queued; while ``draining`` or when ``stopped`` none are.
    """

    def __init__(
        self,
        config: Config,
        queue: UpdateQueue,
        promotion: Promotion,
        traffic: TrafficQuestions,
        reviews: ReviewQueue,
        scoring: UpdateScoring,
        pictures: UpdatePictures,
    ):
        self.settings, self.queue, self.promotion, self.reviews = config.evolution, queue, promotion, reviews
        self.stores_pictures = config.memory.enabled and config.memory.pictures
        self.retention_s = config.memory.retention_days * 86_400
        self.scoring, self.pictures, self.counts = scoring, pictures, queue.counts
        self.traffic, self.questions = traffic, NearQuestions()
        self.traffic.load(self.questions.group)
        self.clear = ClearShare(config.evolution.vote)
        self.forgotten: dict[str, None] = {}
        """Ids of deleted experiences, in order."""
        self.submitted: dict[str, None] = {}
        """Ids of tasks, in order: the same one counts once."""
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
        """See ``Evolution.submit``. ``step``: the update that the learner makes next, None without a learner."""
        voted = verdict is not None and verdict.reason not in (REWARDED, TOLD)
        enough = not voted or self.clear.add(task.user, unclear)
        self.unclear = 0 if enough else self.unclear + 1
        if not enough:
            await self._withdraw("unclear", lambda item: item.task.user == task.user and not item.approved)
        if cause := self._refusal(task) or ("" if enough else "unclear"):
            return self._drop(cause)
        if task.id in self.submitted:
            return self._drop("repeated")
        _remember(self.submitted, {task.id: None})
        try:
            arrays = await views.get()
        except RayError:
            return self._drop("lost")
        first = next(iter(arrays.get(task.trajectories[0].id, [])), None)
        task = await self.scoring.score(task, views, question, step)
        if self.settings.unlearn_s is not None:  # it will be recorded
            storable = await asyncio.to_thread(without_private, task)
            if storable is None:
                return self._drop("private")
            task = storable
        if not self.queue.usable(task):
            self.unusable += 1
            return self._drop("unusable")
        self.unusable = 0
        pictures = await asyncio.to_thread(self.pictures.hold, arrays)
        if cause := self._refusal(task):  # the state may have changed since
            return self._drop(cause)
        self.counts["received"] += 1
        if question is None:
            return await self._push(task, pictures, task.question_id)
        group = self.questions.group(question.conversation, first)
        if originals is not None and await self._hold_out(task, question, group, originals):
            return True
        if (
            verdict is None
            or not needs_review(task.id, self.settings)
            or await asyncio.to_thread(self.reviews.waiting) >= MAX_WAITING
        ):
            return await self._push(task, pictures, group)
        stored = await asyncio.to_thread(_put_for_review, self.reviews, task, verdict, question, arrays)
        self.counts["reviewed" if stored else "private"] += 1
        # Forgotten or called wrong while it was being stored
        if forgotten := task.experience_ids & self.forgotten.keys():
            await asyncio.to_thread(self.reviews.forget, list(forgotten))
        for id in speaking_for(task) & self.feedback.keys():
            await asyncio.to_thread(self.reviews.dispute, id, self.feedback[id])
        return stored

    async def approve(self, id: str) -> bool:
        """Queue the stored task that a reviewer approved; False if nothing can be learnt from it any more."""
        task = await asyncio.to_thread(self.reviews.task, id)
        review = await asyncio.to_thread(self.reviews.get, id)
        if task is None or review is None:  # deleted meanwhile
            return False
        views = await asyncio.to_thread(self.reviews.views, id)
        task = await self.scoring.score(task, views, None, None)
        pictures = await asyncio.to_thread(self.pictures.hold, views)
        first = next(iter(views.get(task.trajectories[0].id, [])), None)
        group = self.questions.group(review.question.conversation, first)
        queued = self.queue.usable(task) and await self._push(task, pictures, group, approved=True)
        if not queued:
            await asyncio.to_thread(self.reviews.done, [task.id])
        return queued

    async def disown(self, experience_id: str, feedback: Feedback) -> None:
        """Remove the tasks of an experience whose label the feedback calls wrong, also later ones.

        Those that wait for review are left to a person.
        """
        if feedback.correct is None and feedback.answer is None:
            return
        self.feedback.pop(experience_id, None)  # the latest comes last
        _remember(self.feedback, {experience_id: feedback})
        held_out = next((item for item in self.traffic.items if item.experience_id == experience_id), None)
        if held_out is not None and contradicts(feedback, (held_out.question.answers or [""])[0]):
            self.traffic.forget([experience_id])
            await asyncio.to_thread(self.traffic.save)

        def is_wrong(task: UpdateTask) -> bool:
            return experience_id in speaking_for(task) and contradicts(feedback, task.pseudo_label)

        await self._withdraw("disowned", lambda item: is_wrong(item.task))
        await asyncio.to_thread(self.reviews.dispute, experience_id, feedback)

    async def forget(self, experience_ids: Sequence[str]) -> int:
        ids = set(experience_ids)
        _remember(self.forgotten, dict.fromkeys(ids - {""}))
        async with self.queue.changed:
            removed = self.queue.remove(lambda item: bool(item.task.experience_ids & ids))
        held_out = self.traffic.forget(experience_ids)
        await asyncio.to_thread(self.traffic.save)
        return len(removed) + held_out + await asyncio.to_thread(self.reviews.forget, list(experience_ids))

    async def expire(self) -> None:
        if self.traffic.expire(time.time() - self.retention_s):
            await asyncio.to_thread(self.traffic.save)

    async def _withdraw(self, cause: str, chosen: Callable[[QueuedTask], bool]) -> None:
        async with self.queue.changed:
            removed = self.queue.remove(chosen)
            self.counts[cause] += len(removed)
        await asyncio.to_thread(self.reviews.done, [task.id for task in removed])

    def _refusal(self, task: UpdateTask, approved: bool = False) -> str:
        """Why a task must be dropped, empty if it need not. An approved task is queued even while paused."""
        if self.draining or self.stopped or task.experience_ids & self.forgotten.keys():
            return "refused"
        if self.paused and not approved:
            return "paused"
        known = [self.feedback[id] for id in speaking_for(task) & self.feedback.keys()]
        if not approved and any(contradicts(feedback, task.pseudo_label) for feedback in known):
            return "disowned"
        return "withdrawn" if task.policy_versions & self.promotion.withdrawn else ""

    def _drop(self, cause: str) -> Literal[False]:
        self.counts[cause] += 1
        return False

    async def _hold_out(
        self, task: UpdateTask, question: Question, group: str, originals: Mapping[str, ray.ObjectRef]
    ) -> bool:
        """Hold a task out for the canary with the question's pictures, not the policy's views.

        Not about clips or with lost pictures, nor any if the memory stores no pictures.
        """
        canary = self.promotion.canary
        known = all(media.kind == "image" and media.id in originals for media in question.media)
        if canary is None or not (known and self.stores_pictures):
            return False
        source, cap = Source(task.user, group), self.queue.shares.user_cap(time.monotonic())
        if not self.traffic.wants(task, question, source, cap):
            return False
        ids = [media.id for media in question.media]
        try:
            arrays = await asyncio.gather(*(originals[id] for id in ids))
        except RayError:
            return False

        def store() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
            held = {id: self.pictures.add(shrink(a, LONGEST)) for id, a in zip(ids, arrays, strict=True)}
            (own,) = fetch([{task.id: list(held.values())}])
            return held, dict(zip(ids, own[task.id], strict=True))

        pictures, pixels = await asyncio.to_thread(store)
        # Deleted or called wrong since
        if self._refusal(task) or not self.traffic.wants(task, question, source, cap):
            return False
        self.traffic.add(task, question, source, pixels)
        canary.keep(task.id, pictures)
        self.counts["held_out"] += 1
        await asyncio.to_thread(self.traffic.save)
        return True

    async def _push(
        self, task: UpdateTask, views: PictureViews, question: str, approved: bool = False
    ) -> bool:
        async with self.queue.changed:
            if cause := self._refusal(task, approved):  # the state may have changed since
                return self._drop(cause)
            self.queue.push(QueuedTask(task, views, question, approved))
            self.queue.changed.notify_all()
            return True


class UpdateScoring:
    """Scores update tasks whose rewards need a Scorer actor (a state, or vectors of the embedder).

    ``names``: of the Scorer and of the Embedder of its states. Without ``rewards.needs_scorer`` tasks arrive
    scored and are returned as they are.
    """

    def __init__(self, config: Config, names: tuple[str, str] | None):
        self.rewards = config.rewards
        self.names = names if config.rewards.needs_scorer else None

    async def score(
        self, task: UpdateTask, views: GroupViews | Views, question: Question | None, step: int | None
    ) -> UpdateTask:
        """The task scored against its label; unscored if that fails.

        ``views``: arrays by trajectory id, or references to them. With ``step`` the rewards learn from the
        task.
        """
        if self.names is None:
            return task
        group = as_question_group(task, question)
        try:
            scorer, embedder = [await asyncio.to_thread(actor_handle, name) for name in self.names]
            states = embedder.states.remote(group, views) if self.rewards.needs_states else None
            scored = await scorer.score.remote(group, step, states, [task.pseudo_label])
        except (RayError, InfraFailure) as error:
            log.warning("an update task cannot be scored: %s", unwrap_ray_error(error) or error)
            return task
        return task.model_copy(update={"trajectories": scored.trajectories})

    async def advance(self, step: int) -> None:
        if self.names is not None and self.rewards.stateful:
            with log_failures("the rewards did not learn from an update"):
                await (await asyncio.to_thread(actor_handle, self.names[0])).advance.remote(step)


def _put_for_review(
    reviews: ReviewQueue,
    task: UpdateTask,
    verdict: Verdict,
    question: Question,
    views: Mapping[str, Sequence[np.ndarray]],
) -> bool:
    """Store a redacted update until a person decides; False if too little of it may be stored."""
    storable = without_private(task)
    if storable is None:
        return False
    trajectories = [redact_record(trajectory) for trajectory in storable.trajectories]
    task = storable.model_copy(
        update={"trajectories": trajectories, "pseudo_label": redact(task.pseudo_label)}
    )
    shown = representative(task)
    pictures = {image.id: clean_png(view) for image, view in zip(shown.images, views[shown.id], strict=True)}
    reviews.put(
        task,
        redact_record(verdict),
        redact_record(question),
        pictures,
        {t.id: views[t.id] for t in trajectories},
    )
    return True


def without_private(task: UpdateTask) -> UpdateTask | None:
    """The task without trajectories whose tokens spell personal data; None if too few are left to learn from."""
    usable = [t for t in task.trajectories if redact_record(t).token_ids() == t.token_ids()]
    return task.model_copy(update={"trajectories": usable}) if len(usable) >= MIN_TRAJECTORIES else None


def representative(task: UpdateTask) -> Trajectory:
    """The first trajectory that gave the task's label."""
    return next((t for t in task.trajectories if agrees(t.answer, task.pseudo_label)), task.trajectories[0])


def _remember(memory: dict[str, Any], new: Mapping[str, Any]) -> None:
    memory.update(new)
    for name in list(itertools.islice(memory, max(0, len(memory) - REMEMBERED))):
        del memory[name]
