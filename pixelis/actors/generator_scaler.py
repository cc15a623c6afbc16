"""The GeneratorScaler actor: starts generators of a service while it is busy, and retires them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from pixelis.actors.cluster import actor_handle
from pixelis.actors.evolution_monitor import repeat
from pixelis.actors.generator_router import GeneratorRouter
from pixelis.actors.reservations import release
from pixelis.config import Config
from pixelis.telemetry import events
from pixelis.telemetry.events import EventLog

POLL_S = 1.0
"""Seconds between two measurements of the load, and between a gateway's questions for the generators."""
BUSY, IDLE = 0.8, 0.5
"""A generator starts if the load of each exceeds BUSY; one ends if that of the others would stay below IDLE."""


class Scaling:
    """Number of generators between `least` and `most`, with delays against short peaks and lulls."""

    def __init__(self, least: int, most: int, up_s: float, down_s: float):
        self.least, self.most, self.up_s, self.down_s = least, most, up_s, down_s
        self._since: tuple[int, float] = (0, 0.0)

    def wanted(self, count: int, load: float, now: float) -> int:
        """`count`, or one more or less if the load has called for it throughout the delay.

        load: episodes in flight / episodes that a generator decodes at once.
        """
        change = int(load >= BUSY * count) - int(load <= IDLE * (count - 1) and load < BUSY * (count - 1))
        change = max(self.least - count, min(self.most - count, change))
        if change != self._since[0]:
            self._since = change, now
        delay = self.up_s if change > 0 else self.down_s
        if not change or now - self._since[1] < delay:
            return count
        self._since = 0, now
        return count + change


async def follow(router: GeneratorRouter, scaler: str, namespace: str | None = None) -> list[str]:
    """Use the generators that the scaler of this name lists; returns their names."""
    actor = await asyncio.to_thread(actor_handle, scaler, namespace)
    names = list(await actor.generators.remote())
    router.set_members(names)
    return names


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=64)
class GeneratorScaler:
    """Keeps the list of a service's generators, which gateways and Evolution follow.

    names: generators that always run; prefix: of the names of further ones, which end with this actor; start:
    as `placement.start_generator`.
    """

    def __init__(
        self,
        config: Config,
        prefix: str,
        names: Sequence[str],
        store: str,
        evolution: str | None = None,
        start: Callable[..., Any] | None = None,
    ):
        self.config, self.prefix, self.store = config, prefix, store
        self.names, self.fixed = list(names), len(names)
        self.evolution = evolution
        self.start = start
        s = config.serve
        self.scaling = Scaling(self.fixed, config.engine.most_workers, s.upscale_delay_s, s.downscale_delay_s)
        self.groups: dict[str, Any] = {}
        self.handles: dict[str, ActorHandle] = {}
        self.starting: asyncio.Task | None = None
        self.retiring: set[asyncio.Task] = set()
        self.loop: asyncio.Task | None = None
        self.log = EventLog(config.run.dir)

    async def generators(self) -> list[str]:
        """Names of the generators that take requests. The first call starts the scaling."""
        if self.loop is None:
            scaling = repeat(POLL_S, self._scale, "the number of generators could not be adapted")
            self.loop = asyncio.create_task(scaling)
        return self.names

    async def stop(self) -> None:
        for task in filter(None, (self.loop, self.starting, *self.retiring)):
            task.cancel()
        for name in list(self.groups):
            self._end(name)

    async def _scale(self) -> None:
        full = self.config.engine.max_num_seqs  # of one that does not answer: it is as busy as can be
        answers = await asyncio.gather(*(self._sessions(name) for name in self.names))
        sessions = sum(full if answer is None else answer for answer in answers)
        count = len(self.names) + (self.starting is not None)
        wanted = self.scaling.wanted(count, sessions / full, time.monotonic())
        if self.evolution is not None:
            # It may be restarting: it gets the list next time
            with contextlib.suppress(RayError, ValueError):
                await ray.get_actor(self.evolution).use_generators.remote(self.names)
        if wanted > count and self.starting is None:
            taken = {*self.names, *self.groups}
            index = next(i for i in itertools.count(self.fixed) if self._name(i) not in taken)
            self.starting = asyncio.create_task(self._start(index))
        elif wanted < count and self.starting is not None:
            self.starting.cancel()  # it still waits for room
        elif wanted < count:
            task = asyncio.create_task(self._retire(self.names.pop()))
            self.retiring.add(task)
            task.add_done_callback(self.retiring.discard)

    def _name(self, index: int) -> str:
        return f"{self.prefix}-generator-{index}"

    async def _sessions(self, name: str) -> int | None:
        """Open episodes of a generator, 0 of one that has died; None if it does not answer in time."""
        try:
            async with asyncio.timeout(self.config.engine.health_timeout_s):
                if name not in self.handles:
                    self.handles[name] = ray.get_actor(name)
                return int((await self.handles[name].health.remote()).get("sessions", 0))
        except (ActorDiedError, ValueError):
            self.handles.pop(name, None)
            return 0
        except (TimeoutError, RayError):
            return None

    async def _start(self, index: int) -> None:
        from pixelis.actors.placement import start_generator

        name = self._name(index)
        try:
            self.handles[name], self.groups[name] = await asyncio.to_thread(
                self.start or start_generator, self.config, self.store, index, name
            )
            await self.handles[name].ready.remote()
            self.names.append(name)
            self.log.write(events.JOINED, generator=name, generators=len(self.names))
        except BaseException:
            self._end(name)
            raise
        finally:
            self.starting = None

    async def _retire(self, name: str) -> None:
        """End a generator when the gateways have taken notice and its episodes have ended."""
        self.log.write(events.LEFT, generator=name, generators=len(self.names))
        deadline = time.monotonic() + self.config.serve.timeout_s
        await asyncio.sleep(3 * POLL_S)
        while await self._sessions(name) != 0 and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        self._end(name)

    def _end(self, name: str) -> None:
        if (actor := self.handles.pop(name, None)) is not None:
            ray.kill(actor)
        if (group := self.groups.pop(name, None)) is not None:
            release(group)
