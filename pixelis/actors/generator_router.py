"""A fleet of generators behind one call: least loaded first, failures retried elsewhere under a budget."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from pixelis.dialogue.session import SamplingParams
from pixelis.errors import BadInput, InfraFailure
from pixelis.records import Group, Question

RETRY_PAUSE_S = 1.0


@dataclass
class Member:
    """One generator: its handle, episodes in flight and the version it is known to hold (None: not known, so not used)."""

    handle: ActorHandle
    running: int = 0
    version: int | None = None
    recovery: asyncio.Task | None = None
    """Brings it back from quarantine."""

    @property
    def quarantined(self) -> bool:
        return self.recovery is not None and not self.recovery.done()


class Fleet:
    """Routes groups to generators that hold the current version; never touches pixels."""

    def __init__(self, generators: list[ActorHandle], timeout_s: float = 600.0, load_timeout_s: float = 60.0):
        self.members = [Member(g) for g in generators]
        self.timeout_s, self.load_timeout_s = timeout_s, load_timeout_s
        self.version: int | None = None
        self.failures: Counter[str] = Counter()

    async def rollout(
        self, question: Question, group_id: str, n: int, sampling: SamplingParams, operations: bool, max_turns: int
    ) -> tuple[Group, ray.ObjectRef]:
        """One group and the reference to its views; retried on other generators until ``timeout_s`` seconds have passed.

        Raises InfraFailure when no generator could do it in time; data errors of the question pass through.
        """
        give_up = time.monotonic() + self.timeout_s
        while True:
            member, version = await self._pick(give_up), self.version
            member.running += n
            try:
                group, views = member.handle.rollout.remote(question, group_id, n, sampling, operations, max_turns)
                done: Group = await asyncio.wait_for(_result(group), give_up - time.monotonic())
                if done.policy_version in (version, self.version):
                    return done, views
                # It was restarted in between, or another fleet loaded something else.
                self._quarantine(member, "other version")
            except (RayActorError, InfraFailure, TimeoutError) as error:
                self._quarantine(member, _name(error))
            finally:
                member.running -= n

    async def _pick(self, give_up: float) -> Member:
        while time.monotonic() < give_up:
            able = [m for m in self.members if m.version == self.version]
            if able:
                return min(able, key=lambda m: m.running)
            await asyncio.sleep(0.05)
        causes = ", ".join(f"{k} x{v}" for k, v in self.failures.items()) or "no generator holds the current version"
        raise InfraFailure(
            f"no generator was able to work for {self.timeout_s:g} s ({causes})",
            fix="look at `ray status` and at the worker logs of the Ray session",
        )

    def _quarantine(self, member: Member, cause: str) -> None:
        self.failures[cause] += 1
        member.version = None
        if not member.quarantined:
            member.recovery = asyncio.get_running_loop().create_task(self._recover(member))

    async def _recover(self, member: Member) -> None:
        """Bring a generator back: Ray restarts a dead process, we load the version that is current by then."""
        while member.version is None or member.version != self.version:
            await asyncio.sleep(RETRY_PAUSE_S)
            await self._load(member)

    async def load(self, version: int) -> None:
        """Make ``version`` current: a generator that does not load it in ``load_timeout_s`` is quarantined, not used."""
        self.version = version
        await asyncio.gather(*(self._load(m) for m in self.members if not m.quarantined))
        for member in self.members:
            if member.version != version and not member.quarantined:
                self._quarantine(member, "late load")

    async def _load(self, member: Member) -> None:
        try:
            member.version = await asyncio.wait_for(_result(member.handle.load.remote(self.version)), self.load_timeout_s)
        except BadInput:
            raise
        except (RayError, TimeoutError) as error:
            self.failures[f"load {_name(error)}"] += 1

    def stats(self) -> dict[str, float]:
        """Able generators, episodes in flight and failures so far."""
        return {
            "fleet/able": sum(m.version == self.version for m in self.members),
            "fleet/running": sum(m.running for m in self.members),
            "fleet/failures": sum(self.failures.values()),
        }


def _name(error: BaseException) -> str:
    return type(getattr(error, "cause", error)).__name__


async def _result(ref: ray.ObjectRef) -> Any:
    return await ref
