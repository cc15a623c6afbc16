"""Routes groups of episodes to generators: by version and load, with retries on another generator when one fails.

Training, evaluation and the canary *lead*: they decide which version is served, load it, and use only generators that hold it.
Gateways *follow*: nobody tells them which version is promoted, so they take it from what generators were last seen to change to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from pixelis.config import Config
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import BadInput, InfraFailure
from pixelis.records import Group, Question, Turn

log = logging.getLogger(__name__)

POLL_S = 0.05
"""Seconds between looks for a generator that is able to work."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """``samples`` episodes of one question. ``pictures`` holds the reference to its decoded pictures, if it has any."""

    question: Question
    group_id: str
    samples: int
    sampling: SamplingParams
    operations: bool = True
    max_turns: int | None = None
    pictures: Sequence[ray.ObjectRef] = ()

    def arguments(self) -> tuple[Any, ...]:
        """What ``Generator.rollout`` and ``Generator.stream`` take."""
        return self.question, self.group_id, self.samples, self.sampling, self.operations, self.max_turns, self.pictures


@dataclass(frozen=True, slots=True)
class TurnUpdate:
    """A turn of a sample and the uint8 views that it adds. A new ``attempt`` began all samples again on another generator."""

    attempt: int
    sample: int
    turn: Turn
    views: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """A group and the reference to {trajectory id: views}, which is never fetched here."""

    group: Group
    views: ray.ObjectRef


@dataclass(frozen=True, slots=True)
class RouterTimeouts:
    """Seconds: for a group with its retries, for loading a version, between retries, and of distrust after a failure."""

    rollout_s: float = 600.0
    load_s: float = 660.0
    retry_pause_s: float = 1.0
    suspect_s: float = 10.0
    health_s: float = 2.0

    @classmethod
    def of(cls, config: Config) -> RouterTimeouts:
        """Those of a configuration."""
        e = config.engine
        return cls(config.rollout_timeout_s, config.load_timeout_s, e.retry_pause_s, e.suspect_s, e.health_timeout_s)

    @classmethod
    def serving(cls, config: Config) -> RouterTimeouts:
        """Those of a service, whose requests bound its episodes: a rollback must not wait longer for a generator that hangs."""
        e, request_s = config.engine, config.serve.timeout_s
        return cls(request_s, e.load_timeout_s or request_s + 60.0, e.retry_pause_s, e.suspect_s, e.health_timeout_s)


@dataclass(eq=False)
class Member:
    """One generator: an actor or the name of one, its episodes in flight and the version it was last seen to hold."""

    actor: ActorHandle | str
    running: int = 0
    version: int | None = None
    failed_at: float = float("-inf")
    reserved: Reservation | None = None
    recovery: asyncio.Task | None = None
    """Brings it back from quarantine."""

    @property
    def name(self) -> str:
        return self.actor if isinstance(self.actor, str) else str(getattr(self.actor, "_ray_actor_id", self.actor))

    @property
    def quarantined(self) -> bool:
        return self.recovery is not None and not self.recovery.done()


@dataclass(eq=False)
class Reservation:
    """Generators that keep ``version`` until ``released``, whatever becomes current meanwhile."""

    version: int
    released: asyncio.Event = field(default_factory=asyncio.Event)


class GeneratorRouter:
    """The generators of one caller; never touches pixels. Members join and leave while it runs.

    ``generators`` are actors, or names in ``namespace`` that are looked up again after a failure. A router that ``follows``
    loads nothing; ``attempts`` limits on how many generators a group is tried (None: as many as the time allows).
    """

    def __init__(
        self,
        generators: Sequence[ActorHandle | str],
        timeouts: RouterTimeouts | None = None,
        *,
        follows: bool = False,
        attempts: int | None = None,
        namespace: str | None = None,
    ):
        self.members = [Member(generator) for generator in generators]
        self.timeouts = timeouts or RouterTimeouts()
        self.follows, self.attempts, self.namespace = follows, attempts, namespace
        self.version: int | None = None
        self.changed_at = 0.0
        self.failures: Counter[str] = Counter()
        self.handles: dict[str, ActorHandle] = {}
        self.loads = 0
        self.looking: asyncio.Task | None = None

    # -- membership -------------------------------------------------------------------------------------------------

    def join(self, generator: ActorHandle | str) -> None:
        """Use one more generator, once it holds the current version."""
        member = Member(generator)
        self.members.append(member)
        if not self.follows and self.version is not None:
            self._quarantine(member, "joined")

    def leave(self, generator: ActorHandle | str) -> None:
        """Give a generator no more work; what it is doing goes on."""
        leaving = [m for m in self.members if m.actor == generator]
        self.members = [m for m in self.members if m.actor != generator]
        for member in leaving:
            if member.recovery is not None:
                member.recovery.cancel()

    # -- episodes ---------------------------------------------------------------------------------------------------

    async def rollout(self, request: RolloutRequest, reserved: Reservation | None = None) -> RolloutResult:
        """One group; on the generators of ``reserved`` when given. Raises what ``episodes`` raises."""
        async with aclosing(self.episodes(request, reserved=reserved)) as items:
            async for item in items:
                if isinstance(item, RolloutResult):
                    return item
        raise AssertionError("the last item is the group")

    async def episodes(
        self, request: RolloutRequest, *, stream: bool = False, reserved: Reservation | None = None
    ) -> AsyncGenerator[TurnUpdate | RolloutResult, None]:
        """The group of a request; with ``stream`` its turns as they happen before it.

        A generator that fails is replaced by another within ``rollout_s`` seconds and ``attempts`` tries. Closing this, or
        cancelling who waits for it, ends the episodes. Raises InfraFailure when no generator could do it; errors of the question
        pass through.
        """
        give_up = time.monotonic() + self.timeouts.rollout_s
        tried: set[Member] = set()
        attempt = 0
        while True:
            member, expected = await self._pick(give_up, tried, reserved)
            try:
                async with aclosing(self._attempt(member, request, attempt, stream, give_up)) as items:
                    async for item in items:
                        if isinstance(item, RolloutResult) and not self._accepts(item.group.policy_version, expected):
                            raise _OtherVersion  # it was restarted in between, or another router loaded something else
                        yield item
                return
            except (InfraFailure, TimeoutError, _OtherVersion) as error:
                attempt += 1
                self._failed(member, error)
                if self.attempts is not None and attempt >= self.attempts:
                    raise InfraFailure("no generator could answer", code="no_generator") from None
                if self.follows and len(self.members) == 1:
                    await asyncio.sleep(self.timeouts.retry_pause_s)  # nobody else: give the only one a moment to restart
                tried.add(member)

    def _accepts(self, version: int, expected: int | None) -> bool:
        return self.follows or version in (expected, self.version)

    async def _pick(self, give_up: float, tried: set[Member], reserved: Reservation | None) -> tuple[Member, int | None]:
        """The least loaded generator of the wanted version, and that version; waits for one until ``give_up``."""
        while True:
            if self.follows:
                return self._follow(tried), None
            expected = reserved.version if reserved is not None else self.version
            able = [m for m in self.members if m.version == expected and (reserved is None or m.reserved is reserved)]
            late = time.monotonic() >= give_up
            if able and not late:
                return min(able, key=lambda m: (m in tried, m.running)), expected
            if late:
                causes = ", ".join(f"{k} x{v}" for k, v in self.failures.items()) or "no generator holds the current version"
                raise InfraFailure(
                    f"no generator was able to work for {self.timeouts.rollout_s:g} s ({causes})",
                    fix="look at `ray status` and at the worker logs of the Ray session",
                )
            await asyncio.sleep(POLL_S)

    async def _attempt(
        self, member: Member, request: RolloutRequest, attempt: int, stream: bool, give_up: float
    ) -> AsyncGenerator[TurnUpdate | RolloutResult, None]:
        """The items of one attempt. Whatever ends it early also ends the rollout, which frees the engine's rows at once."""
        actor, started = await self._handle(member), time.monotonic()
        member.running += request.samples
        call: Any = None
        try:
            if stream:
                call = actor.stream.remote(*request.arguments())
                group: Group | None = None
                async for ref in call:
                    if group is not None:
                        views = ref
                        break
                    item = await asyncio.wait_for(_value(ref), give_up - time.monotonic())
                    if isinstance(item, Group):
                        group = item
                    else:
                        for event in item:
                            yield TurnUpdate(attempt, *event)
            else:
                call, views = actor.rollout.remote(*request.arguments())
                group = await asyncio.wait_for(_value(call), give_up - time.monotonic())
            call = None
            assert group is not None
            if self.follows:
                self.saw(member, group.policy_version, started)
            yield RolloutResult(group, views)
        except RayTaskError as error:
            cause = _cause(error)
            if isinstance(cause, InfraFailure | RayError | TimeoutError):  # something behind the generator failed
                raise InfraFailure(f"generator {member.name} could not answer") from cause
            raise (cause if isinstance(cause, BadInput) else error) from None
        except RayError as error:
            raise InfraFailure(f"generator {member.name} is gone") from error
        finally:
            if call is not None:
                _cancel(call)
            member.running -= request.samples

    def _failed(self, member: Member, error: BaseException) -> None:
        cause = error.__cause__ if isinstance(error, InfraFailure) and error.__cause__ else error
        name = "other version" if isinstance(error, _OtherVersion) else type(cause).__name__
        if self.follows:
            log.warning("generator %s failed: %s", member.name, name)
            self.failures[name] += 1
            member.failed_at = time.monotonic()
            self.handles.pop(member.name, None)
        else:
            self._quarantine(member, name)

    async def _handle(self, member: Member) -> ActorHandle:
        """The member's actor. Raises InfraFailure when none runs under its name."""
        if not isinstance(member.actor, str):
            return member.actor
        if member.actor not in self.handles:
            try:
                self.handles[member.actor] = await asyncio.to_thread(ray.get_actor, member.actor, self.namespace)
            except ValueError:
                raise InfraFailure(f"no generator named {member.actor} is running") from None
        return self.handles[member.actor]

    # -- leading: versions are loaded ----------------------------------------------------------------------------------

    async def load(self, version: int) -> None:
        """Make ``version`` current on all generators; returns when each holds it or is quarantined as late.

        Reserved generators load it when they are released: it becomes current at once where others are left, else then. A load
        that a newer one overtakes meanwhile is left out. Raises BadInput for weights that no engine takes.
        """
        self.loads += 1
        mine = self.loads
        await self._some_free()
        if mine != self.loads:
            return
        self.version = version
        free = [m for m in self.members if m.reserved is None]
        await asyncio.gather(*(self._load(m) for m in free if not m.quarantined))
        for member in free:
            if member.version != version == self.version and not member.quarantined:
                self._quarantine(member, "late load")

    @asynccontextmanager
    async def reserve(self, version: int, share: float = 1.0) -> AsyncIterator[Reservation]:
        """Keep ``version`` on a ``share`` of the generators, at least one, whatever is loaded meanwhile.

        Raises BadInput for weights that no engine takes.
        """
        reservation = Reservation(version)
        await self._some_free()
        free = sorted((m for m in self.members if m.reserved is None), key=lambda m: (m.version != version, m.running))
        reserved = free[: max(1, round(share * len(self.members)))]
        for member in reserved:
            member.reserved = reservation
        try:
            await asyncio.gather(*(self._load(m) for m in reserved if m.version != version and not m.quarantined))
            for member in reserved:
                if member.version != version and not member.quarantined:
                    self._quarantine(member, "late load")
            yield reservation
        finally:
            for member in reserved:
                member.reserved = None
            reservation.released.set()
            for member in reserved:
                if self.version is not None and member.version != self.version and not member.quarantined:
                    self._quarantine(member, "")

    async def _some_free(self) -> None:
        """Wait while every generator is reserved."""
        while self.members and all(m.reserved for m in self.members):
            await next(m.reserved for m in self.members if m.reserved).released.wait()

    async def _load(self, member: Member) -> None:
        version = member.reserved.version if member.reserved is not None else self.version
        try:
            actor = await self._handle(member)
            member.version = await asyncio.wait_for(_value(actor.load.remote(version)), self.timeouts.load_s)
        except BadInput:
            raise
        except (RayError, TimeoutError, InfraFailure) as error:
            self.failures[f"load {type(_cause(error)).__name__}"] += 1

    def _quarantine(self, member: Member, cause: str) -> None:
        """Give it no work until it holds the version that it should; a cause that is no failure is not named."""
        if cause:
            self.failures[cause] += 1
        member.version = None
        if not member.quarantined:
            member.recovery = asyncio.get_running_loop().create_task(self._recover(member, bool(cause)))

    async def _recover(self, member: Member, failed: bool) -> None:
        """Bring a generator back: Ray restarts a dead process, we load the version that is current by then."""
        while member.version is None or member.version != (member.reserved.version if member.reserved else self.version):
            if failed:
                await asyncio.sleep(self.timeouts.retry_pause_s)
            failed = True
            await self._load(member)

    # -- following: versions are observed ------------------------------------------------------------------------------

    def _follow(self, tried: set[Member]) -> Member:
        """The fewest samples in flight; those tried, just failed, or behind in version last, in this order."""
        now = time.monotonic()
        behind = [m for m in self.members if m.version is not None and m.version != self.version]
        if behind and self.looking is None:
            self.looking = asyncio.create_task(self._look())

        def rank(m: Member) -> tuple[bool, bool, bool, int]:
            return m in tried, now - m.failed_at < self.timeouts.suspect_s, m in behind, m.running

        return min(self.members, key=rank)

    async def _look(self) -> None:
        """See whether those behind have changed; they get no work that would tell."""
        try:
            await self.health()
            await asyncio.sleep(self.timeouts.retry_pause_s / 2)
        finally:
            self.looking = None

    def saw(self, member: Member, version: int, since: float) -> None:
        """``member`` held ``version`` at ``since`` (monotonic seconds): what started before the last change says nothing new."""
        if since < self.changed_at or version == member.version:
            return
        known, member.version = member.version, version
        if known is not None or self.version is None or version > self.version:
            self.version, self.changed_at = version, time.monotonic()

    async def health(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """What each generator that answers in time says about itself."""
        limit = self.timeouts.health_s if timeout_s is None else timeout_s

        async def ask(member: Member) -> dict[str, Any]:
            actor, since = await self._handle(member), time.monotonic()
            answer = dict(await _value(actor.health.remote()))
            if self.follows and answer.get("started", True):  # before that it holds the bare model and serves nobody
                self.saw(member, int(answer["version"]), since)
            return {"name": member.name, **answer}

        async def bounded(member: Member) -> dict[str, Any] | None:
            try:
                return await asyncio.wait_for(ask(member), limit)
            except (TimeoutError, RayError, InfraFailure):
                self.handles.pop(member.name, None)
                return None

        return [h for h in await asyncio.gather(*(bounded(m) for m in self.members)) if h is not None]

    def stats(self) -> dict[str, float]:
        """Generators that are able to work, episodes in flight and failures so far."""
        return {
            "generators/able": sum(m.version == self.version for m in self.members),
            "generators/running": sum(m.running for m in self.members),
            "generators/failures": sum(self.failures.values()),
        }


class _OtherVersion(Exception):
    """A group was rolled out with a version that nobody asked for."""


def _cause(error: BaseException) -> BaseException:
    """What was raised at the bottom of an actor that called an actor."""
    while isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
        error = error.cause
    return error


def _cancel(call: Any) -> None:
    ray.cancel(call)


async def _value(ref: ray.ObjectRef) -> Any:
    return await ref
