"""The Generator actors behind a gateway: who answers next, what happens when it fails, and what the answer is made of."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from pixelis.errors import BadInput, InfraFailure
from pixelis.records import Group, Question, Turn, new_id
from pixelis.serve.events import Ask

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 1.0
SUSPECT_S = 10.0
"""Seconds during which a generator that just failed is chosen only when no other is left."""
LOOK_S = 0.5
"""Seconds between looks at generators that are behind."""


@dataclass(frozen=True, slots=True)
class Happened:
    """A turn of a sample and the uint8 views that it adds. A new ``attempt`` began all samples again on another generator."""

    attempt: int
    sample: int
    turn: Turn
    views: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Rolled:
    """A group and the reference to {trajectory id: views}, which is never fetched here."""

    group: Group
    views: ray.ObjectRef


class GeneratorPool:
    """The Generator actors by name: of those with the promoted version the least loaded answers, another when it fails.

    Nobody tells a replica which version is promoted. It is the one that a generator was last seen to change to: a generator
    loads nothing else. One that still holds another is chosen last until it was seen to have changed, too.
    """

    def __init__(self, names: Sequence[str], namespace: str):
        if not names:
            raise BadInput("the gateway was given no generator", fix="pass the names of running Generator actors")
        self.names, self.namespace = list(names), namespace
        self.running: Counter[str] = Counter()
        self.failed_at: dict[str, float] = {}
        self.versions: dict[str, int] = {}
        self.promoted: int | None = None
        self.changed_at = 0.0
        self.handles: dict[str, ActorHandle] = {}
        self.looking: asyncio.Task | None = None

    def pick(self, tried: set[str]) -> str:
        """The name with the fewest samples in flight; those tried, behind in version, or just failed last, in this order."""
        now, behind = time.monotonic(), self._behind()
        if behind and self.looking is None:
            self.looking = asyncio.create_task(self._look())

        def rank(name: str) -> tuple[bool, bool, bool, int]:
            return name in tried, now - self.failed_at.get(name, -SUSPECT_S) < SUSPECT_S, name in behind, self.running[name]

        return min(self.names, key=rank)

    def _behind(self) -> set[str]:
        """Who was last seen with another version than the promoted one."""
        return {name for name, version in self.versions.items() if version != self.promoted}

    async def _look(self) -> None:
        """See whether those behind have changed; they get no work that would tell."""
        try:
            await self.health()
            await asyncio.sleep(LOOK_S)
        finally:
            self.looking = None

    def saw(self, name: str, version: int, since: float) -> None:
        """``name`` held ``version`` at ``since`` (monotonic seconds): what started before the last change says nothing new."""
        known = self.versions.get(name)
        if since < self.changed_at or version == known:
            return
        self.versions[name] = version
        if known is not None or self.promoted is None or version > self.promoted:
            self.promoted, self.changed_at = version, time.monotonic()

    async def handle(self, name: str) -> ActorHandle:
        """The actor of that name. Raises InfraFailure when there is none."""
        if name not in self.handles:
            try:
                self.handles[name] = await asyncio.to_thread(ray.get_actor, name, self.namespace)
            except ValueError:
                raise InfraFailure(f"no generator named {name} is running") from None
        return self.handles[name]

    async def episodes(
        self, question: Question, ask: Ask, pictures: Sequence[ray.ObjectRef], stream: bool = False
    ) -> AsyncGenerator[Happened | Rolled, None]:
        """``ask.samples`` episodes of a question: with ``stream`` their turns as they happen, and at last the group.

        ``pictures`` holds the reference to the question's decoded pictures, if it has any.
        Tried on two generators at most. Closing this, or cancelling who waits for it, ends the episodes. Raises InfraFailure
        when both fail.
        """
        tried: set[str] = set()
        for attempt in range(2):
            name = self.pick(tried)
            try:
                async with aclosing(self._attempt(name, question, ask, pictures, attempt, stream)) as items:
                    async for item in items:
                        yield item
                return
            except InfraFailure as error:
                log.warning("generator %s failed: %s", name, type(error.__cause__ or error).__name__)
                self.failed_at[name] = time.monotonic()
                self.handles.pop(name, None)
                if not attempt and len(self.names) == 1:
                    await asyncio.sleep(RESTART_PAUSE_S)  # nobody else: give the only one a moment to restart
                tried.add(name)
        raise InfraFailure("no generator could answer", code="no_generator")

    async def _attempt(
        self, name: str, question: Question, ask: Ask, pictures: Sequence[ray.ObjectRef], attempt: int, stream: bool
    ) -> AsyncGenerator[Happened | Rolled, None]:
        """The items of one attempt. Whatever ends it early also ends the rollout, which frees the engine's rows at once."""
        actor, started = await self.handle(name), time.monotonic()
        arguments = (question, new_id("group"), ask.samples, ask.sampling, ask.operations, ask.max_turns, pictures)
        self.running[name] += ask.samples
        call: Any = None
        try:
            if stream:
                call = actor.stream.remote(*arguments)
                group: Group | None = None
                async for ref in call:
                    if group is not None:
                        views = ref
                        break
                    item = await ref
                    if isinstance(item, Group):
                        group = item
                    else:
                        for event in item:
                            yield Happened(attempt, *event)
            else:
                call, views = actor.rollout.options(num_returns=2).remote(*arguments)
                group = await call
            call = None
            assert group is not None
            self.saw(name, group.policy_version, started)
            yield Rolled(group, views)
        except RayTaskError as error:
            cause = _cause(error)
            if isinstance(cause, InfraFailure | RayError | TimeoutError):  # something behind the generator failed
                raise InfraFailure(f"generator {name} could not answer") from cause
            raise (cause if isinstance(cause, BadInput) else error) from None
        except RayError as error:
            raise InfraFailure(f"generator {name} is gone") from error
        finally:
            if call is not None:
                ray.cancel(call)
            self.running[name] -= ask.samples

    async def health(self, timeout_s: float = 2.0) -> list[dict[str, Any]]:
        """What each generator that answers in time says about itself."""

        async def one(name: str) -> dict[str, Any]:
            actor, since = await self.handle(name), time.monotonic()
            told = dict(await _value(actor.health.remote()))
            if told.get("started", True):  # before that it holds the bare model and serves nobody
                self.saw(name, int(told["version"]), since)
            return {"name": name, **told}

        async def bounded(name: str) -> dict[str, Any] | None:
            try:
                return await asyncio.wait_for(one(name), timeout_s)
            except (TimeoutError, RayError, InfraFailure):
                self.handles.pop(name, None)
                return None

        return [h for h in await asyncio.gather(*(bounded(name) for name in self.names)) if h is not None]


def _cause(error: BaseException) -> BaseException:
    """What was raised at the bottom of an actor that called an actor."""
    while isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
        error = error.cause
    return error


async def _value(ref: ray.ObjectRef) -> Any:
    return await ref
