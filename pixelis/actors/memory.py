"""The client of the experience memory, whose shards are chosen by the hash of the id."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from pixelis.actors.cluster import actor_handle
from pixelis.actors.memory_shard import shard_of
from pixelis.config import MemoryConfig
from pixelis.errors import BadInput, InfraFailure
from pixelis.memory import Entry
from pixelis.memory.rows import Place, experience
from pixelis.records import Experience, Feedback, Neighbour, new_id

RETRY_TIMEOUT_S = 30.0
"""Seconds for which idempotent calls are retried while a shard restarts."""
RETRY_PAUSE_S = 0.1
MAX_SIZE_AGE_S = 1.0
UNAVAILABLE = "unavailable"

Near = list[tuple[str, float]]
"""Ids and similarities, best first."""
Ids = list[str]
T = TypeVar("T")
Experiences = list[Experience]


@dataclass(slots=True)
class SearchResult:
    """Neighbours, best first; ``partial``: a shard did not answer in time."""

    neighbours: list[Neighbour] = field(default_factory=list)
    retrieval_id: str = ""
    partial: bool = False


class Memory:
    """The shards of an experience memory, called by name, as one memory."""

    def __init__(self, names: Sequence[str], namespace: str, config: MemoryConfig):
        self.names, self.namespace, self.config = list(names), namespace, config
        self._handles: dict[int, ActorHandle] = {}
        self._size: tuple[float, list[int]] = (float("-inf"), [0] * len(self.names))
        self._background: set[asyncio.Future] = set()
        self._unavailable: dict[int, asyncio.Future] = {}
        self._withdrawn: list[int] = []

    # -- calls

    async def _call(self, number: int, method: str, *arguments: Any) -> Any:
        """Call a shard once. After its death its name is looked up again: a successor may have it."""
        if number not in self._handles:
            self._handles[number] = actor_handle(self.names[number], self.namespace)
        try:
            return await getattr(self._handles[number], method).remote(*arguments)
        except RayTaskError as error:
            raise getattr(error, "cause", error) from None
        except RayActorError:
            self._handles.pop(number, None)
            raise

    async def _retry(self, number: int, method: str, *arguments: Any) -> Any:
        """An idempotent call, retried until the shard answers; InfraFailure after RETRY_TIMEOUT_S."""
        deadline = time.monotonic() + RETRY_TIMEOUT_S
        while True:
            try:
                # `wait_for` may swallow a cancellation
                async with asyncio.timeout(deadline - time.monotonic()):
                    return await self._call(number, method, *arguments)
            except (RayActorError, TimeoutError) as error:
                if time.monotonic() + RETRY_PAUSE_S > deadline:
                    raise InfraFailure(
                        f"memory shard {self.names[number]} did not answer for {RETRY_TIMEOUT_S:g} s",
                        fix="see `ray status` and the worker logs of the Ray session",
                    ) from error
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        return await asyncio.gather(*(self._retry(i, method, *arguments) for i in range(len(self.names))))

    async def _call_owners(self, method: str, ids: Sequence[str], *arguments: Any) -> list[Any]:
        parts = self._grouped(ids).items()
        return await asyncio.gather(*(self._retry(n, method, *arguments, part) for n, part in parts))

    async def _call_owner(self, method: str, id: str, *arguments: Any) -> Any:
        return await self._retry(shard_of(id, len(self.names)), method, id, *arguments)

    async def _call_within(self, timeout_s: float, method: str, *arguments: Any) -> dict[int, Any]:
        """Results by number of the shards that answer in time.

        A dead or late shard is not called again until it answers ``health``: a restart must not slow every
        search.
        """
        waiting = {
            number: asyncio.ensure_future(self._call(number, method, *arguments))
            for number in range(len(self.names))
            if number not in self._unavailable
        }
        if waiting:
            await asyncio.wait(waiting.values(), timeout=timeout_s)
        results = {}
        for number, task in waiting.items():
            try:
                if task.cancel():  # it is late
                    self._mark_unavailable(number)
                else:
                    results[number] = task.result()
            except (RayError, InfraFailure):
                self._mark_unavailable(number)
        return results

    def _mark_unavailable(self, number: int) -> None:
        async def wait_for_answer() -> None:
            try:
                await self._retry(number, "health")
            except InfraFailure:
                await asyncio.sleep(RETRY_PAUSE_S)
            finally:
                self._unavailable.pop(number, None)

        if number not in self._unavailable:
            self._unavailable[number] = asyncio.ensure_future(wait_for_answer())

    def _grouped(self, items: Iterable[T], id_of: Callable[[T], str] = str) -> dict[int, list[T]]:
        groups: dict[int, list[T]] = {}
        for item in items:
            groups.setdefault(shard_of(id_of(item), len(self.names)), []).append(item)
        return groups

    # -- adding and searching

    async def add(self, entries: Sequence[Entry]) -> list[bool]:
        """Store entries durably; True for each that is new. Idempotent.

        InfraFailure if a shard does not answer; the entries of the other shards are then stored.
        """
        groups = self._grouped(range(len(entries)), lambda i: entries[i].experience.id)
        answers = await asyncio.gather(
            *(self._retry(n, "add", [entries[i] for i in group]) for n, group in groups.items())
        )
        new = zip(itertools.chain(*groups.values()), itertools.chain(*answers), strict=True)
        return [added for _, added in sorted(new)]

    async def nearest(self, vectors: np.ndarray, k: int) -> tuple[list[list[tuple[str, float]]], bool]:
        """Ids and similarities of the ``k`` nearest of each of ``vectors`` [n, d]; True if partial."""
        vectors = np.ascontiguousarray(vectors, np.float32)
        answers = await self._call_within(self.config.timeout_s, "search", vectors, k)
        merged = [merge([lists[i] for lists in answers.values()], k) for i in range(len(vectors))]
        return merged, len(answers) < len(self.names)

    async def search(
        self,
        vector: np.ndarray,
        k: int,
        track: bool = True,
        user: str | None = None,
        text: str = "",
        timeout_s: float | None = None,
    ) -> SearchResult:
        """The ``k`` nearest experiences of ``vector`` [d] within ``timeout_s`` (None: ``memory.timeout_s``).

        ``user`` and ``text`` restrict the search as in ``Shard.search``; ``track`` counts the retrieval.
        """
        call = "find", np.asarray(vector, np.float32), k, user, text
        answers = await self._call_within(timeout_s or self.config.timeout_s, *call)
        near = sorted(itertools.chain(*answers.values()), key=lambda pair: -pair[0])[:k]
        neighbours = [Neighbour(experience=experience(row), similarity=self._cosine(s)) for s, row in near]
        result = SearchResult(neighbours, new_id("retrieval"), partial=len(answers) < len(self.names))
        if track:
            for number, ids in self._grouped(n.experience.id for n in result.neighbours).items():
                self._run_in_background(self._call(number, "retrieved", result.retrieval_id, ids))
        return result

    def _cosine(self, similarity: float) -> float:
        """Cosine of unit vectors at distance d: 1 - d^2/2, exact for euclidean, a lower bound for manhattan."""
        return similarity if self.config.metric == "cosine" else max(-1.0, 1 - similarity**2 / 2)

    def _run_in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        """A failure, for example of a shard that is away, is ignored."""

        async def run() -> None:
            with contextlib.suppress(RayActorError, BadInput, InfraFailure):
                await work

        task = asyncio.ensure_future(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def drain(self) -> None:
        await asyncio.gather(*self._background, return_exceptions=True)

    # -- experiences

    async def succeeded(self, retrieval_id: str, ids: Sequence[str]) -> int:
        return sum(await self._call_owners("succeeded", ids, retrieval_id))

    async def get(self, id: str) -> Experience | None:
        row = await self._call_owner("row", id)
        return experience(row) if row is not None else None

    async def pictures(self, id: str) -> dict[str, bytes]:
        return await self._call_owner("pictures", id)

    async def list(self, limit: int, after: Place | None = None, user: str | None = None) -> list[Experience]:
        rows = [pair for part in await self._call_all("list_rows", limit, after, user) for pair in part]
        rows.sort(key=lambda pair: (-pair[0], pair[1][0]))
        return [experience(row) for _, row in rows[:limit]]

    async def feedback(self, id: str, feedback: Feedback) -> Experience:
        return await self._call_owner("feedback", id, feedback)

    def withdraw(self, versions: Sequence[int]) -> None:
        async def send(number: int) -> None:
            while self._withdrawn is current:  # until a later call replaces the list
                with contextlib.suppress(InfraFailure):
                    return await self._retry(number, "withdraw", current)
                await asyncio.sleep(RETRY_PAUSE_S)  # a full disk fails at once

        current = self._withdrawn = list(versions)
        for number in range(len(self.names)):
            self._run_in_background(send(number))

    def correct(self, id: str, answer: str) -> None:
        """Store a reviewer's answer as feedback: an experience with another one neither votes nor teaches."""
        self._run_in_background(self.feedback(id, Feedback(answer=answer, created_at=time.time())))

    def learnt(self, ids: Sequence[str]) -> None:
        self._run_in_background(self._call_owners("learnt", ids))

    async def delete(self, ids: Sequence[str]) -> int:
        self._size = (float("-inf"), self._size[1])
        return sum(await self._call_owners("delete", ids))

    async def delete_user(self, user: str) -> Ids:
        self._size = (float("-inf"), self._size[1])
        return [id for part in await self._call_all("delete_user", user) for id in part]

    async def sample(self, n: int, seed: int | None = None, status: str | None = None) -> Experiences:
        generators = map(
            np.random.default_rng, np.random.SeedSequence(seed).generate_state(len(self.names), np.uint64)
        )
        parts = await asyncio.gather(
            *(self._retry(i, "draw", n, rng, status) for i, rng in enumerate(generators))
        )
        ids = [id for _, id in sorted(pair for part in parts for pair in part)[:n]]
        experiences = await asyncio.gather(*(self.get(id) for id in ids), return_exceptions=True)
        return [e for e in experiences if isinstance(e, Experience)]

    async def export(self, folder: str | Path) -> int:
        paths = [str(Path(folder).absolute() / f"shard-{i}.parquet") for i in range(len(self.names))]
        return sum(await asyncio.gather(*(self._call(i, "export", path) for i, path in enumerate(paths))))

    async def load(self, path: str | Path) -> int:
        file, n = str(Path(path).absolute()), len(self.names)

        def belongs_to(number: int) -> Callable[[str], bool]:
            return lambda id: shard_of(id, n) == number

        return sum(await asyncio.gather(*(self._call(i, "load", file, belongs_to(i)) for i in range(n))))

    async def stats(self) -> dict[str, float]:
        parts = list((await self._answers("stats")).values())
        size = sum(p["size"] for p in parts)
        summed = ("size", "capacity", "added", "vectors", "retrievals", "successes", "bytes", "damaged")
        result = {
            **{f"memory/{name}": sum(p[name] for p in parts) for name in summed},
            "memory/shards": len(self.names),
            "memory/shards_away": len(self.names) - len(parts),
            "memory/mean_priority": sum(p["mean_priority"] * p["size"] for p in parts) / max(size, 1),
        }
        if filled := [p for p in parts if p["newest"] is not None]:
            result["memory/newest"] = max(p["newest"] for p in filled)
            result["memory/oldest"] = min(p["oldest"] for p in filled)
        return result

    async def size(self) -> int:
        """Number of experiences, at most two seconds old; a dead shard counts with its last size."""
        age = time.monotonic() - self._size[0]
        if age == float("inf"):
            await self._count()
        elif age > MAX_SIZE_AGE_S:
            self._size = (time.monotonic(), self._size[1])
            self._run_in_background(self._count())
        return sum(self._size[1])

    async def _count(self) -> None:
        answers = await self._answers("pulse")
        sizes = [answers[n][0] if n in answers else previous for n, previous in enumerate(self._size[1])]
        self._size = (time.monotonic(), sizes)

    async def condition(self) -> tuple[str, int]:
        """Why a shard stores nothing at present (empty if all store), and the number of damaged experiences."""
        answers = await self._answers("pulse")
        away = UNAVAILABLE if len(answers) < len(self.names) else ""
        refusal = next((refusal for _, refusal, _ in answers.values() if refusal), away)
        return refusal, sum(damaged for _, _, damaged in answers.values())

    async def _answers(self, method: str) -> dict[int, Any]:
        return await self._call_within(max(1.0, self.config.timeout_s), method)


def merge(lists: Sequence[Near], k: int) -> Near:
    return sorted((pair for part in lists for pair in part), key=lambda pair: -pair[1])[:k]
