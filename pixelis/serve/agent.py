"""One request: k sampled trajectories from a generator, a vote, a verdict, and what the learner may take from it."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from PIL import Image
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from pixelis.config import Config
from pixelis.engines import SamplingParams
from pixelis.errors import BadInput, InfraFailure
from pixelis.evolution.updates import make_task
from pixelis.evolution.vote import agrees, majority
from pixelis.operations.media import load_image
from pixelis.records import Group, Media, Question, StopReason, Trajectory, Verdict, new_id

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 1.0
SUSPECT_S = 10.0
"""Seconds during which a generator that just failed, or lags behind, is chosen only when no other is left."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request. ``images`` are data URLs; ``learn`` false keeps it out of the update stream."""

    question: str
    images: list[str]
    samples: int
    sampling: SamplingParams
    operations: bool = True
    max_turns: int = 1
    learn: bool = True


@dataclass(slots=True)
class Answer:
    """What the samples said: their group, the verdict, the trajectory that stands for it, a reference to all views."""

    verdict: Verdict
    group: Group
    winner: Trajectory
    views: Any = field(repr=False)
    seconds: float = 0.0


class GeneratorPool:
    """The Generator actors by name: the least loaded answers, a dead one is replaced once by another."""

    def __init__(self, names: Sequence[str], namespace: str):
        if not names:
            raise BadInput("the gateway was given no generator", fix="pass the names of running Generator actors")
        self.names, self.namespace = list(names), namespace
        self.running: Counter[str] = Counter()
        self.failed_at: dict[str, float] = {}
        self.newest = 0
        self.handles: dict[str, ActorHandle] = {}

    def pick(self, tried: set[str]) -> str:
        """The name with the fewest samples in flight, those tried or just failed last."""
        now = time.monotonic()

        def rank(name: str) -> tuple[bool, bool, int]:
            return name in tried, now - self.failed_at.get(name, -SUSPECT_S) < SUSPECT_S, self.running[name]

        return min(self.names, key=rank)

    async def handle(self, name: str) -> ActorHandle:
        """The actor of that name. Raises InfraFailure when there is none."""
        if name not in self.handles:
            try:
                self.handles[name] = await asyncio.to_thread(ray.get_actor, name, self.namespace)
            except ValueError:
                raise InfraFailure(f"no generator named {name} is running") from None
        return self.handles[name]

    async def rollout(self, question: Question, ask: Ask) -> tuple[Group, ray.ObjectRef]:
        """The group of ``ask.samples`` trajectories, and a reference to {trajectory id: views}.

        Tried on two generators at most. Cancelling this call cancels the rollout. Raises InfraFailure when both fail.
        """
        tried: set[str] = set()
        for last in (False, True):
            name = self.pick(tried)
            try:
                group, views = await self._rollout_on(name, question, ask)
                if group.policy_version < self.newest:  # it did not load the promoted version yet: prefer the others
                    self.failed_at[name] = time.monotonic()
                self.newest = max(self.newest, group.policy_version)
                return group, views
            except InfraFailure as error:
                log.warning("generator %s failed: %s", name, type(error.__cause__ or error).__name__)
                self.failed_at[name] = time.monotonic()
                self.handles.pop(name, None)
                if not last and len(self.names) == 1:
                    await asyncio.sleep(RESTART_PAUSE_S)  # nobody else: give the only one a moment to restart
                tried.add(name)
        raise InfraFailure("no generator could answer", code="no_generator")

    async def _rollout_on(self, name: str, question: Question, ask: Ask) -> tuple[Group, ray.ObjectRef]:
        actor = await self.handle(name)
        self.running[name] += ask.samples
        arguments = (question, new_id("group"), ask.samples, ask.sampling, ask.operations, ask.max_turns)
        refs: list[ray.ObjectRef] = []
        try:
            refs = actor.rollout.options(num_returns=2).remote(*arguments)
            return await _value(refs[0]), refs[1]
        except asyncio.CancelledError:
            ray.cancel(refs[0])  # deadline or the caller went away: free the engine's rows at once
            raise
        except RayTaskError as error:
            cause = _cause(error)
            if isinstance(cause, InfraFailure | RayError | TimeoutError):  # something behind the generator failed
                raise InfraFailure(f"generator {name} could not answer") from cause
            raise (cause if isinstance(cause, BadInput) else error) from None
        except RayError as error:
            raise InfraFailure(f"generator {name} is gone") from error
        finally:
            self.running[name] -= ask.samples

    async def health(self, timeout_s: float = 2.0) -> list[dict[str, Any]]:
        """What each generator that answers in time says about itself."""

        async def one(name: str) -> dict[str, Any]:
            actor = await self.handle(name)
            return {"name": name, **dict(await _value(actor.health.remote()))}

        async def bounded(name: str) -> dict[str, Any] | None:
            try:
                return await asyncio.wait_for(one(name), timeout_s)
            except (TimeoutError, RayError, InfraFailure):
                self.handles.pop(name, None)
                return None

        return [h for h in await asyncio.gather(*(bounded(name) for name in self.names)) if h is not None]


class Agent:
    """Answers requests by vote and hands confident verdicts to the Evolution actor. Holds no model, trusts no input."""

    def __init__(self, config: Config, generator_names: Sequence[str], evolution_name: str | None, namespace: str):
        self.config = config
        self.pool = GeneratorPool(generator_names, namespace)
        self.evolution_name, self.namespace = evolution_name, namespace
        self.evolution: ActorHandle | None = None
        self.decoding = asyncio.Semaphore(2)
        self.counts: Counter[str] = Counter()
        self.version: int | None = None
        self.background: set[asyncio.Task] = set()

    async def answer(self, ask: Ask) -> Answer:
        """Sample, vote, and pick the trajectory that stands for the verdict.

        Raises BadImage for pictures outside the caps, BadInput for a prompt that does not fit, InfraFailure.
        """
        started = time.monotonic()
        media = [await self._media(i, url) for i, url in enumerate(ask.images)]
        question = Question(id=new_id("q"), question=ask.question, media=media, task="serve", split="serve")
        group, views = await self.pool.rollout(question, ask)
        if not group.trajectories:
            raise InfraFailure("the generator returned no trajectory")
        if all(t.stop_reason is StopReason.OVER_CONTEXT and not t.policy_turns for t in group.trajectories):
            raise BadInput("the question and its pictures do not fit the model's context", code="context_length_exceeded")
        verdict = majority([t.answer for t in group.trajectories])
        self.version = group.policy_version
        self.counts["answered"] += 1
        answer = Answer(verdict, group, winning(group, verdict), views, time.monotonic() - started)
        if ask.learn:
            self._learn_later(answer)
        return answer

    async def _media(self, index: int, url: str) -> Media:
        caps = self.config.toolbox
        async with self.decoding:  # a picture may take a second and 150 MB to decode: never many at once
            picture = await asyncio.to_thread(load_image, url, caps.max_image_bytes, caps.max_image_pixels)
        return Media(id=f"img{index}", uri=url, height=picture.shape[0], width=picture.shape[1])

    async def pictures(self, answer: Answer) -> dict[str, str]:
        """PNG data URLs of what the winner saw, by image id. Raises InfraFailure when the views are lost."""
        try:
            views = (await _value(answer.views))[answer.winner.id]
        except RayError as error:
            raise InfraFailure("the trajectory's pictures were lost with their generator") from error
        urls = await asyncio.to_thread(lambda: [png_url(view) for view in views])
        return {image.id: url for image, url in zip(answer.winner.images, urls, strict=True)}

    def _learn_later(self, answer: Answer) -> None:
        """Offer the answer to the learner after the reply; a slow or dead Evolution actor never delays one."""
        if self.evolution_name is None or not self.config.evolution.enabled:
            return
        if len(self.background) >= self.config.evolution.queue:
            self.counts["update_not_sent"] += 1
            return
        task = asyncio.create_task(self._learn(answer))
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def _learn(self, answer: Answer) -> None:
        config = self.config
        try:
            task = await asyncio.to_thread(make_task, answer.group, answer.verdict, config.evolution, config.rewards)
            if task is None:
                self.counts["gated"] += 1
                return
            # In a list the reference itself travels: the pictures stay where they are until the learner wants them.
            await _value((await self._evolution_actor()).submit.remote(task, [answer.views]))
            self.counts["update_sent"] += 1
        except (RayError, InfraFailure) as error:
            self.evolution = None
            self.counts["update_not_sent"] += 1
            log.warning("update not sent: %s", type(error).__name__)
        except Exception:
            self.counts["update_not_sent"] += 1
            log.exception("an update task could not be made")

    async def _evolution_actor(self) -> ActorHandle:
        actor = self.evolution
        if actor is None:
            try:
                actor = await asyncio.to_thread(ray.get_actor, self.evolution_name or "", self.namespace)
            except ValueError:
                raise InfraFailure(f"no Evolution actor named {self.evolution_name} is running") from None
            self.evolution = actor
        return actor

    async def evolution_stats(self, timeout_s: float = 2.0) -> dict[str, int]:
        """Counters of the Evolution actor; empty when there is none or it does not answer in time."""
        if self.evolution_name is None:
            return {}
        try:
            actor = await self._evolution_actor()
            return dict(await asyncio.wait_for(_value(actor.stats.remote()), timeout_s))
        except (TimeoutError, RayError, InfraFailure):
            self.evolution = None
            return {}


def winning(group: Group, verdict: Verdict) -> Trajectory:
    """The first sample that gave the verdict's answer; the first of all when none answered."""
    for trajectory in group.trajectories:
        if verdict.answer is not None and agrees(trajectory.answer, verdict.answer):
            return trajectory
    return group.trajectories[0]


def png_url(view: np.ndarray) -> str:
    """A uint8 HxWx3 view as a PNG data URL."""
    buffer = io.BytesIO()
    Image.fromarray(view).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _cause(error: BaseException) -> BaseException:
    """What was raised at the bottom of an actor that called an actor."""
    while isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
        error = error.cause
    return error


async def _value(ref: ray.ObjectRef) -> Any:
    return await ref
