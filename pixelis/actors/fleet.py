"""A fleet of generators behind one call: least loaded first, failures retried elsewhere under a budget."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from pixelis.engines import SamplingParams
from pixelis.errors import InfraFailure
from pixelis.records import Group, Question

RETRY_PAUSE_S = 1.0


@dataclass
class Member:
    """One generator: its handle, episodes in flight and the version it is known to hold (None: quarantined)."""

    handle: ActorHandle
    running: int = 0
    version: int | None = 0


class Fleet:
    """Routes groups to generators that hold the current version; never touches pixels."""

    def __init__(self, generators: list[ActorHandle], deadline_s: float = 600.0, load_timeout_s: float = 60.0):
        self.members = [Member(g) for g in generators]
        self.deadline_s, self.load_timeout_s = deadline_s, load_timeout_s
        self.version = 0
        self.failures: Counter[str] = Counter()

    async def rollout(
        self, question: Question, group_id: str, n: int, sampling: SamplingParams, operations: bool, max_turns: int
    ) -> tuple[Group, ray.ObjectRef]:
        """One group and the reference to its views; retried on other generators until ``deadline_s`` seconds have passed.

        Raises InfraFailure when no generator could do it in time; data errors of the question pass through.
        """
        give_up = time.monotonic() + self.deadline_s
        while True:
            member = await self._pick(give_up)
            member.running += n
            try:
                group, views = member.handle.rollout.remote(question, group_id, n, sampling, operations, max_turns)
                return await group, views
            except (RayActorError, ActorUnavailableError, InfraFailure) as error:
                self.failures[type(error).__name__] += 1
                if member.version is not None:
                    member.version = None
                    asyncio.get_running_loop().create_task(self._recover(member))
            finally:
                member.running -= n

    async def _pick(self, give_up: float) -> Member:
        while True:
            able = [m for m in self.members if m.version == self.version]
            if able:
                return min(able, key=lambda m: m.running)
            if time.monotonic() > give_up:
                causes = ", ".join(f"{k} x{v}" for k, v in self.failures.items()) or "no generator holds the current version"
                raise InfraFailure(
                    f"no generator was able to work for {self.deadline_s:g} s ({causes})",
                    fix="look at `ray status` and at the worker logs of the Ray session",
                )
            await asyncio.sleep(0.05)

    async def _recover(self, member: Member) -> None:
        """Bring a generator back that died: Ray restarts the process, we load the current version into it."""
        give_up = time.monotonic() + self.deadline_s
        while member.version is None and time.monotonic() < give_up:
            await asyncio.sleep(RETRY_PAUSE_S)
            await self._load(member, self.version)

    async def load(self, version: int) -> None:
        """Make ``version`` current: a generator that does not load it in ``load_timeout_s`` is quarantined, not used."""
        self.version = version
        await asyncio.gather(*(self._load(m, version) for m in self.members))
        for member in self.members:
            if member.version != version:
                member.version = None
                asyncio.get_running_loop().create_task(self._recover(member))

    async def _load(self, member: Member, version: int) -> None:
        try:
            member.version = await asyncio.wait_for(_result(member.handle.load.remote(version)), self.load_timeout_s)
        except (RayActorError, ActorUnavailableError, GetTimeoutError, TimeoutError) as error:
            self.failures[f"load {type(error).__name__}"] += 1

    def stats(self) -> dict[str, float]:
        """Able generators, episodes in flight and failures so far."""
        return {
            "fleet/able": sum(m.version == self.version for m in self.members),
            "fleet/running": sum(m.running for m in self.members),
            "fleet/failures": sum(self.failures.values()),
        }


async def _result(ref: ray.ObjectRef) -> Any:
    return await ref
