"""Routes rollout requests to generators by version and load; retries on another generator when one fails.

Routers of training, evaluation and the canary load versions. A gateway's router *follows*: it infers the
promoted version from those that generators report.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from pixelis.actors.cluster import actor_handle
from pixelis.actors.generator_member import HUNG_CHECKS, Member, Reservation, WrongVersion, root_cause
from pixelis.actors.group_views import SharedViews
from pixelis.actors.rollout_messages import RolloutRequest, RolloutResult, TextUpdate, TurnUpdate
from pixelis.config import Config
from pixelis.errors import BadInput, InfraFailure
from pixelis.records import Group

log = logging.getLogger(__name__)

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RouterTimeouts:
    """Limits in seconds.

    rollout_s includes the retries; a follower avoids a generator that failed for suspect_s; a hanging process
    misses HUNG_CHECKS checks of health_s.
    """

    rollout_s: float = 600.0
    load_s: float = 660.0
    retry_pause_s: float = 1.0
    suspect_s: float = 10.0
    health_s: float = 2.0

    @classmethod
    def of(cls, config: Config) -> RouterTimeouts:
        return cls(config.rollout_timeout_s, config.load_timeout_s, health_s=config.engine.health_timeout_s)

    @classmethod
    def serving(cls, config: Config) -> RouterTimeouts:
        """Of a service: a rollback waits for a hanging generator no longer than a request may take."""
        timeout = config.serve.timeout_s
        return cls(timeout, timeout + 60.0, health_s=config.engine.health_timeout_s)


class GeneratorRouter:
    """Router over a caller's generators, which may join and leave at any time.

    generators: actors, or names in `namespace`, looked up again after a failure; attempts: most attempts per
    group (None: until the timeout).
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
        self.load_count = 0
        self.shared_views = SharedViews()
        self.polling: asyncio.Task | None = None
        self.awake = asyncio.Event()
        self.awake.set()

    # -- membership

    def join(self, generator: ActorHandle | str) -> None:
        member = Member(generator)
        self.members.append(member)
        if not self.follows and self.version is not None:
            self._quarantine(member, "joined")

    def leave(self, generator: ActorHandle | str) -> None:
        for member in [m for m in self.members if m.actor == generator]:
            self.members.remove(member)
            if member.recovery is not None:
                member.recovery.cancel()

    def set_members(self, generators: Sequence[ActorHandle | str]) -> None:
        for member in [m for m in self.members if m.actor not in generators]:
            self.leave(member.actor)
        known = [m.actor for m in self.members]
        for generator in generators:
            if generator not in known:
                self.join(generator)

    # -- episodes

    async def rollout(self, request: RolloutRequest, reservation: Reservation | None = None) -> RolloutResult:
        """The group of a request, from the generators of a reservation if there is one; raises as `episodes`."""
        async with aclosing(self.episodes(request, reservation=reservation)) as items:
            async for item in items:
                if isinstance(item, RolloutResult):
                    return item
        raise AssertionError("the last item is the group")

    async def episodes(
        self, request: RolloutRequest, *, stream: bool = False, reservation: Reservation | None = None
    ) -> AsyncGenerator[TextUpdate | TurnUpdate | RolloutResult, None]:
        """Yield the group of a request; with `stream` also its turns and text as they are generated.

        Retries on another generator. Closing the iterator ends the episodes. Raises InfraFailure if no
        generator answered, and the errors of the question.
        """
        deadline = time.monotonic() + self.timeouts.rollout_s
        tried: set[Member] = set()
        attempt = 0
        while True:
            member, expected = await self._pick(deadline, tried, reservation)
            try:
                async with aclosing(self._attempt(member, request, attempt, stream, deadline)) as items:
                    async for item in items:
                        if isinstance(item, RolloutResult) and not self.follows:
                            # Outside a reservation, a version that is current by now is right too.
                            current = None if reservation else self.version
                            if item.group.policy_version not in (expected, current):
                                raise WrongVersion(f"generator {member.name} restarted")
                        yield item
                return
            except (InfraFailure, TimeoutError) as error:
                attempt += 1
                cause = type((isinstance(error, InfraFailure) and error.__cause__) or error).__name__
                if self.follows:
                    log.warning("generator %s failed: %s", member.name, cause)
                    self.failures[cause] += 1
                    member.failed_at = time.monotonic()
                    self.handles.pop(member.name, None)
                else:
                    self._quarantine(member, cause)
                if self.attempts is not None and attempt >= self.attempts:
                    raise InfraFailure("no generator could answer", code="no_generator") from None
                if self.follows and len(self.members) == 1:
                    await asyncio.sleep(self.timeouts.retry_pause_s)  # the only generator may be restarting
                tried.add(member)

    async def _pick(
        self, deadline: float, tried: set[Member], reservation: Reservation | None
    ) -> tuple[Member, int | None]:
        """The least loaded generator of the expected version, and that version; waits until `deadline`."""
        while True:
            if self.follows:
                return self._pick_follower(tried), None
            expected = reservation.version if reservation is not None else self.version
            if time.monotonic() >= deadline:
                causes = ", ".join(f"{k} x{v}" for k, v in self.failures.items())
                raise InfraFailure(
                    f"no generator was available for {self.timeouts.rollout_s:g} s ({causes or 'all load'})",
                    fix="look at `ray status` and at the worker logs of the Ray session",
                )
            own = [m for m in self.members if reservation is None or m.reservation is reservation]
            if available := [m for m in own if m.version == expected]:
                return min(available, key=lambda m: (m in tried, m.running)), expected
            await asyncio.sleep(POLL_S)

    async def _attempt(
        self, member: Member, request: RolloutRequest, attempt: int, stream: bool, deadline: float
    ) -> AsyncGenerator[TextUpdate | TurnUpdate | RolloutResult, None]:
        """The items of one attempt. Ending early cancels the rollout, which frees the engine's rows at once."""
        actor, started = await self._handle(member), time.monotonic()
        member.running += request.samples
        if member.watch is None or member.watch.done():
            member.watch = asyncio.create_task(self._watch(member))
        media = request.question.media if request.views else []
        known = self.shared_views.of(media)
        request = replace(request, known={id: views.ref for id, views in known.items()})
        call: Any = None
        refs: list[ray.ObjectRef] = []
        try:
            if stream:
                call = actor.stream.remote(request)
                group: Group | None = None
                while (ref := await member.answer(anext(call, None), deadline)) is not None:
                    if group is not None:
                        refs.append(ref)
                        if len(refs) > len(media):
                            break
                        continue
                    item = await member.answer(ref, deadline)
                    if isinstance(item, Group):
                        group = item
                    else:
                        for event in item:
                            kind = TextUpdate if len(event) == 2 else TurnUpdate
                            yield kind(attempt, *event)
            else:
                call, *refs = actor.rollout.options(num_returns=2 + len(media)).remote(request)
                group = await member.answer(call, deadline)
            call = None
            assert group is not None
            member.answered = actor
            if self.follows:
                self.observe_version(member, group.policy_version, started)
            if len(refs) <= len(media):
                raise InfraFailure(f"generator {member.name} died")  # at the end of a stream
            views = await self.shared_views.collect(group, refs[0], refs[1:], known)
            yield RolloutResult(group, views)
        except RayTaskError as error:
            cause = root_cause(error)
            if isinstance(cause, InfraFailure | RayError | TimeoutError):  # of an actor that it called
                raise InfraFailure(f"generator {member.name} could not answer") from cause
            raise (cause if isinstance(cause, BadInput) else error) from None
        except RayError as error:
            raise InfraFailure(f"generator {member.name} died") from error
        finally:
            if call is not None:
                ray.cancel(call)
            member.running -= request.samples
            if not member.running and member.watch is not None:
                member.watch.cancel()
                member.watch = None

    async def _watch(self, member: Member) -> None:
        """Return when the process of a generator hangs. Its health checks have a thread of their own."""
        while True:
            await asyncio.sleep(self.timeouts.health_s)
            with suppress(RayError, InfraFailure):  # of a process that has died, which ends its calls
                actor = await self._handle(member)
                check = asyncio.ensure_future(actor.health.remote())
                try:
                    # One check, but not one wait: if this event loop was late, the answer is there
                    for _ in range(HUNG_CHECKS):
                        if not check.done():
                            await asyncio.wait({check}, timeout=self.timeouts.health_s)
                    if not check.done() and member.answered == actor:
                        return
                    await check
                    member.answered = actor
                finally:
                    check.cancel()

    async def _handle(self, member: Member) -> ActorHandle:
        if not isinstance(member.actor, str):
            return member.actor
        if member.actor not in self.handles:
            self.handles[member.actor] = await asyncio.to_thread(actor_handle, member.actor, self.namespace)
        return self.handles[member.actor]

    # -- loading versions

    async def load(
        self, version: int, arrange: Callable[[list[str]], Awaitable[dict[str, Any]]] | None = None
    ) -> None:
        """Make `version` current on all generators; returns when each has loaded it or is quarantined.

        arrange: returns places in a broadcast of the version by generator. Reserved generators load it after
        their release; if all are reserved, the call waits, or is skipped if a newer one overtakes it. Raises
        BadInput for weights that the engine rejects.
        """
        self.load_count += 1
        number = self.load_count
        await self._wait_for_unreserved()
        if number != self.load_count:
            return
        self.version = version
        free = [m for m in self.members if m.reservation is None]
        able = [m for m in free if not m.quarantined]
        try:
            places = await arrange([m.name for m in able]) if arrange is not None else {}
        except (RayError, InfraFailure) as error:
            self.failures[f"stream {type(root_cause(error)).__name__}"] += 1
            places = {}
        await asyncio.gather(*(self._load(m, version, places.get(m.name)) for m in able))
        for member in free:
            if member.version != version == self.version and member.reservation is None:
                self._quarantine(member, "late load")

    async def sleep(self) -> None:
        self.awake.clear()
        await asyncio.gather(*(self._call(m, "sleep") for m in self.members if not m.quarantined))

    async def wake(self) -> None:
        if not self.awake.is_set():
            await asyncio.gather(*(self._call(m, "wake") for m in self.members))
            self.awake.set()

    async def _call(self, member: Member, method: str) -> None:
        try:
            actor = await self._handle(member)
            async with asyncio.timeout(self.timeouts.load_s):
                await getattr(actor, method).remote()
        except (RayError, TimeoutError, InfraFailure) as error:
            self._quarantine(member, f"{method} {type(root_cause(error)).__name__}")

    @asynccontextmanager
    async def reserve(self, version: int, share: float = 1.0) -> AsyncIterator[Reservation]:
        """Reserve a share of the generators, at least one, for `version`. Loads of other versions skip them.

        Raises BadInput for weights that the engine rejects.
        """
        reservation = Reservation(version)
        await self._wait_for_unreserved()
        free = sorted(
            (m for m in self.members if m.reservation is None),
            key=lambda m: (m.version != version, m.running),
        )
        reserved = free[: max(1, round(share * len(self.members)))]
        for member in reserved:
            member.reservation = reservation
        try:
            outdated = [m for m in reserved if m.version != version or m.loading.locked()]
            await asyncio.gather(*(self._load(m) for m in outdated if not m.quarantined))
            for member in reserved:
                if member.version != version:
                    self._quarantine(member, "late load")
            yield reservation
        finally:
            for member in reserved:
                member.reservation = None
            reservation.released.set()
            for member in reserved:
                if self.version is not None and member.version != self.version:
                    self._quarantine(member)

    async def _wait_for_unreserved(self) -> None:
        while self.members and all(m.reservation for m in self.members):
            await next(m.reservation for m in self.members if m.reservation).released.wait()

    def _version_of(self, member: Member) -> int | None:
        return member.reservation.version if member.reservation is not None else self.version

    async def _load(self, member: Member, broadcast: int | None = None, place: Any = None) -> None:
        """Load the version that a member has to hold, from its `place` if that is the one of the `broadcast`."""
        await self.awake.wait()
        try:
            # One at a time: a reservation may begin while another version is being loaded.
            async with asyncio.timeout(self.timeouts.load_s), member.loading:
                version = self._version_of(member)
                actor = await self._handle(member)
                # Of another version than the one that is broadcast, if a newer load or a reservation came
                # meanwhile.
                arguments = (version,) if place is None or version != broadcast else (version, place)
                member.version = await actor.load.remote(*arguments)
                member.answered = actor
        except BadInput:
            raise
        except (RayError, TimeoutError, InfraFailure) as error:
            self.failures[f"load {type(root_cause(error)).__name__}"] += 1
            self.handles.pop(member.name, None)
            if type(error) is ActorDiedError and not isinstance(member.actor, str):
                log.error("generator %s has died and Ray does not restart it: %s", member.name, error)
                self.leave(member.actor)

    def _quarantine(self, member: Member, failure: str | None = None) -> None:
        """Give a generator no work until it has loaded its version. failure: its name, if this is one."""
        member.version = None
        if not member.quarantined:
            self.failures += Counter([failure] if failure else [])
            member.recovery = asyncio.create_task(self._recover(member, pause=bool(failure)))

    async def _recover(self, member: Member, pause: bool) -> None:
        """Load the version until it succeeds: Ray restarts dead processes. pause: also before the first try."""
        while member in self.members and (
            member.version is None or member.version != self._version_of(member)
        ):
            if pause:
                await asyncio.sleep(self.timeouts.retry_pause_s)
            pause = True
            await self._load(member)

    # -- following: observing versions

    def _pick_follower(self, tried: set[Member]) -> Member:
        now = time.monotonic()
        outdated = [m for m in self.members if m.version is not None and m.version != self.version]
        if outdated and self.polling is None:
            self.polling = asyncio.create_task(self._poll())

        def rank(m: Member) -> tuple[bool, bool, bool, int]:
            return m in tried, now - m.failed_at < self.timeouts.suspect_s, m in outdated, m.running

        return min(self.members, key=rank)

    async def _poll(self) -> None:
        try:
            await self.health()
            await asyncio.sleep(self.timeouts.retry_pause_s / 2)
        finally:
            self.polling = None

    def observe_version(self, member: Member, version: int, since: float) -> None:
        """Record that a generator held `version` at the monotonic time `since`; older reports are ignored."""
        if since < self.changed_at or version == member.version:
            return
        previous, member.version = member.version, version
        if previous is not None or self.version is None or version > self.version:
            self.version, self.changed_at = version, time.monotonic()

    async def health(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        timeout = self.timeouts.health_s if timeout_s is None else timeout_s

        async def health_of(member: Member) -> dict[str, Any] | None:
            try:
                async with asyncio.timeout(timeout):
                    actor, since = await self._handle(member), time.monotonic()
                    health = dict(await actor.health.remote())
            except (TimeoutError, RayError, InfraFailure):
                self.handles.pop(member.name, None)
                return None
            # Before its start it holds the bare model and serves nobody
            if self.follows and health.get("started", True):
                self.observe_version(member, int(health["version"]), since)
            return {"name": member.name, **health}

        return [h for h in await asyncio.gather(*map(health_of, self.members)) if h is not None]

    async def pieces(self, turns: Sequence[Sequence[int]]) -> list[list[bytes]]:
        for member in sorted(self.members, key=lambda m: m.running):
            try:
                async with asyncio.timeout(self.timeouts.health_s):
                    return list(await (await self._handle(member)).pieces.remote(turns))
            except (TimeoutError, RayError, InfraFailure):
                self.handles.pop(member.name, None)
        raise InfraFailure("no generator could answer", code="no_generator")

    def stats(self) -> dict[str, float]:
        return {
            "generators/able": sum(m.version == self.version for m in self.members),
            "generators/running": sum(m.running for m in self.members),
            "generators/failures": sum(self.failures.values()),
        }
