"""The experience memory as actors: shards by the hash of the id, and the client that presents them as one memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from pixelis import config as configuration
from pixelis.actors.cluster import freeze_gc
from pixelis.config import Config
from pixelis.errors import BadConfig, InfraFailure
from pixelis.memory import Entry, Shard
from pixelis.memory.shard import Place, Row, experience, unknown
from pixelis.records import Experience, Feedback, Neighbour, new_id

__all__ = ["Entry", "Found", "Memory", "MemoryShard", "place_shards"]

THREADS = 16
"""Calls of a shard at once: adds that wait together share a commit."""
PATIENCE_S = 30.0
"""Seconds in which a call that may be repeated is repeated while its shard restarts."""
PAUSE_S = 0.1
SIZE_S = 1.0
"""Age at which the known size is asked for again."""
PRUNE_S = 3600.0

Near = list[tuple[str, float]]
"""Ids and similarity, best first."""
Ids = list[str]
Experiences = list[Experience]


def shard_of(id: str, shards: int) -> int:
    """The shard that keeps an experience."""
    return int.from_bytes(hashlib.sha256(id.encode()).digest()[:8], "big") % shards


def folder_of(config: Config) -> Path:
    """The folder of all shards."""
    return Path(config.memory.dir) if config.memory.dir else Path(config.run.dir) / "memory"


@ray.remote(max_restarts=-1, max_concurrency=THREADS)
class MemoryShard:
    """One shard in the folder ``shard-I-of-N``; after a restart it is what was acknowledged before. Each call in a thread."""

    def __init__(self, config: Config, number: int = 0):
        memory = config.memory
        folder = folder_of(config)
        others = [path.name for path in folder.glob("shard-*-of-*") if not path.name.endswith(f"-of-{memory.shards}")]
        if others:
            raise BadConfig(
                f"the memory in {folder} was kept by another number of shards ({', '.join(sorted(others))})",
                fix="set memory.shards as it was, or export each old shard (pixelis.memory.Shard(FOLDER, Memory()).export), move "
                "the folder away and give the files to Memory.load",
            )
        share = -(-memory.capacity // memory.shards)
        self.shard = Shard(folder / f"shard-{number}-of-{memory.shards}", memory, share)
        self.pruned_at = 0.0
        self._prune()
        freeze_gc()

    def _prune(self) -> None:
        if time.monotonic() - self.pruned_at > PRUNE_S or not self.pruned_at:
            self.pruned_at = time.monotonic()
            self.shard.prune(time.time())

    def health(self) -> dict[str, Any]:
        """Answers when alive."""
        import os

        return {"pid": os.getpid(), "recovery_s": self.shard.recovery_s}

    def add(self, entries: list[Entry]) -> list[bool]:
        self._prune()
        return self.shard.add(entries)

    def search(self, vectors: np.ndarray, k: int) -> list[list[tuple[str, float]]]:
        return self.shard.search(vectors, k)

    def find(self, vector: np.ndarray, k: int) -> list[tuple[float, Row]]:
        """The ``k`` nearest with their records: more than the winners of all shards need, but in one call instead of two."""
        (near,) = self.shard.search(vector[None], k)
        rows = self.shard.rows([id for id, _ in near])
        return [(similarity, row) for (_, similarity), row in zip(near, rows, strict=True) if row is not None]

    def rows(self, ids: list[str]) -> list[Row | None]:
        return self.shard.rows(ids)

    def list_rows(self, limit: int, after: Place | None, user: str | None) -> list[tuple[float, Row]]:
        return self.shard.list_rows(limit, after, user)

    def pictures(self, id: str) -> dict[str, bytes]:
        return self.shard.pictures(id)

    def retrieved(self, retrieval: str, ids: list[str]) -> None:
        self.shard.retrieved(retrieval, ids)

    def succeeded(self, retrieval: str, ids: list[str]) -> int:
        return self.shard.succeeded(retrieval, ids)

    def feedback(self, id: str, feedback: Feedback) -> None:
        self.shard.feedback(id, feedback)

    def withdraw(self, versions: list[int]) -> int:
        return self.shard.withdraw(versions)

    def draw(self, n: int, seed: int) -> list[tuple[float, str]]:
        return self.shard.draw(n, np.random.default_rng(seed))

    def delete(self, ids: list[str]) -> int:
        return self.shard.delete(ids)

    def delete_user(self, user: str) -> list[str]:
        return self.shard.delete_user(user)

    def prune(self, now: float) -> list[str]:
        return self.shard.prune(now)

    def export(self, path: str) -> int:
        return self.shard.export(path)

    def load(self, path: str, number: int, shards: int) -> int:
        """Add those of a file that this shard keeps."""
        return self.shard.load(path, lambda id: shard_of(id, shards) == number)

    def stats(self) -> dict[str, Any]:
        return self.shard.stats()

    def close(self) -> None:
        """Write what waits and let go of the folder: before the actor is ended on purpose."""
        self.shard.close()


def place_shards(config: Config, prefix: str) -> tuple[list[str], list[ActorHandle]]:
    """Start all shards under the names ``PREFIX-memory-I``; they are ready when ``health`` answers."""
    names = [f"{prefix}-memory-{number}" for number in range(config.memory.shards)]
    kind: Any = MemoryShard
    made = [kind.options(name=name, num_cpus=config.memory.cpus).remote(config, i) for i, name in enumerate(names)]
    return names, made


@dataclass(slots=True)
class Found:
    """Neighbours, best first, under a retrieval id by which a success is told; ``partial``: some shard did not answer in time."""

    neighbours: list[Neighbour] = field(default_factory=list)
    retrieval_id: str = ""
    partial: bool = False


class Memory:
    """All shards as one memory, for a coroutine of any actor or replica; ``names`` in the order of their numbers."""

    def __init__(self, names: Sequence[str], namespace: str, config: configuration.MemoryConfig):
        self.names, self.namespace, self.config = list(names), namespace, config
        self._handles: dict[int, ActorHandle] = {}
        self._size: tuple[float, list[int]] = (float("-inf"), [0] * len(self.names))
        self._background: set[asyncio.Future] = set()
        self._away: dict[int, asyncio.Future] = {}
        self._withdrawn: list[int] = []

    # --- calls --------------------------------------------------------------------------------------------------------------

    def _call(self, number: int, method: str, *arguments: Any) -> Any:
        if number not in self._handles:
            try:
                self._handles[number] = ray.get_actor(self.names[number], self.namespace)
            except ValueError as error:
                raise InfraFailure(
                    f"there is no memory shard {self.names[number]}",
                    fix="start the service's memory, or set memory.enabled=false",
                ) from error
        return getattr(self._handles[number], method).remote(*arguments)

    async def _answer(self, number: int, method: str, *arguments: Any) -> Any:
        """What one shard answers. Of a dead one the name is looked up anew: a successor may have taken it."""
        try:
            return await _result(self._call(number, method, *arguments))
        except RayActorError:
            self._handles.pop(number, None)
            raise

    async def _surely(self, number: int, method: str, *arguments: Any) -> Any:
        """A call that may be repeated, repeated until its shard answers; InfraFailure after ``PATIENCE_S``."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                async with asyncio.timeout(give_up - time.monotonic()):  # wait_for may swallow a cancellation
                    return await self._answer(number, method, *arguments)
            except (RayActorError, TimeoutError) as error:
                if time.monotonic() + PAUSE_S > give_up:
                    raise InfraFailure(
                        f"memory shard {self.names[number]} did not answer for {PATIENCE_S:g} s ({type(error).__name__})",
                        fix="look at `ray status` and at the worker logs of the Ray session",
                    ) from error
            await asyncio.sleep(PAUSE_S)

    async def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        return list(await asyncio.gather(*(self._surely(i, method, *arguments) for i in range(len(self.names)))))

    async def _in_time(self, calls: dict[int, tuple[Any, ...]], until: float) -> dict[int, Any]:
        """What the shards answer until then to method and arguments; one dead or late is left out. Errors of ours pass.

        A shard that was left out is not waited for again until it has answered: a restart must not slow every search.
        """
        waiting: dict[asyncio.Future, int] = {}
        for number, call in calls.items():
            if number not in self._away:
                waiting[asyncio.ensure_future(self._answer(number, *call))] = number
        if not waiting:
            return {}
        done, late = await asyncio.wait(waiting, timeout=max(0.0, until - time.monotonic()))
        for task in late:
            task.cancel()
            self._left_out(waiting[task])
        out = {}
        for task in done:
            try:
                out[waiting[task]] = task.result()
            except (RayError, InfraFailure):
                self._left_out(waiting[task])
        return out

    def _left_out(self, number: int) -> None:
        async def until_it_answers() -> None:
            try:
                await self._surely(number, "health")
            except InfraFailure:
                await asyncio.sleep(PAUSE_S)
            finally:
                self._away.pop(number, None)

        if number not in self._away:
            self._away[number] = asyncio.ensure_future(until_it_answers())

    def _by_shard(self, ids: Sequence[str]) -> dict[int, list[str]]:
        out: dict[int, list[str]] = {}
        for id in ids:
            out.setdefault(shard_of(id, len(self.names)), []).append(id)
        return out

    # --- adding and finding -------------------------------------------------------------------------------------------------

    async def add(self, entries: Sequence[Entry]) -> list[bool]:
        """Store entries; True for each that is new. All of them are on the disk on return.

        Safe to repeat. InfraFailure when a shard stays away: then those of the other shards are stored, and none is reported.
        """
        parts: dict[int, list[int]] = {}
        for place, entry in enumerate(entries):
            parts.setdefault(shard_of(entry.experience.id, len(self.names)), []).append(place)
        answers = await asyncio.gather(*(self._surely(n, "add", [entries[i] for i in places]) for n, places in parts.items()))
        out = [False] * len(entries)
        for places, answer in zip(parts.values(), answers, strict=True):
            for place, new in zip(places, answer, strict=True):
                out[place] = new
        return out

    async def nearest(self, vectors: np.ndarray, k: int) -> tuple[list[list[tuple[str, float]]], bool]:
        """Ids and similarity of the ``k`` nearest of each of ``vectors`` [n, d] over all shards, and whether that is partial."""
        until = time.monotonic() + self.config.timeout_s
        vectors = np.ascontiguousarray(vectors, np.float32)
        numbers = range(len(self.names))
        passed = ray.put(vectors) if vectors.nbytes > 50_000 and len(self.names) > 1 else vectors
        answers = await self._in_time(dict.fromkeys(numbers, ("search", passed, k)), until)
        lists = [answers[n] for n in numbers if n in answers]
        return [merge([one[i] for one in lists], k) for i in range(len(vectors))], len(lists) < len(self.names)

    async def search(self, vector: np.ndarray, k: int, track: bool = True) -> Found:
        """The ``k`` nearest experiences of ``vector`` [d] within ``memory.timeout_s``.

        ``partial`` when a shard is away or late; the others' are then exact. ``track`` False counts no retrieval: nothing is
        written. A neighbour's similarity is the cosine whatever ranked it, for ``manhattan`` the least that it can be.
        """
        numbers, until = range(len(self.names)), time.monotonic() + self.config.timeout_s
        answers = await self._in_time(dict.fromkeys(numbers, ("find", np.asarray(vector, np.float32), k)), until)
        near = sorted((pair for n in numbers for pair in answers.get(n, ())), key=lambda pair: -pair[0])[:k]
        neighbours = [Neighbour(experience=experience(row), similarity=self._cosine(s)) for s, row in near]
        result = Found(neighbours, new_id("retrieval"), partial=len(answers) < len(self.names))
        if track:
            for number, ids in self._by_shard([n.experience.id for n in result.neighbours]).items():
                self._later(number, "retrieved", result.retrieval_id, ids)
        return result

    def _cosine(self, similarity: float) -> float:
        """Of vectors of length 1 at the negative distance: 1 - d^2/2 of the euclidean d, which manhattan's is never below."""
        return similarity if self.config.metric == "cosine" else max(-1.0, 1 - similarity**2 / 2)

    def _later(self, number: int, method: str, *arguments: Any) -> None:
        """A call nobody waits for: a count that a crash may lose."""

        async def call() -> None:
            try:
                await self._answer(number, method, *arguments)
            except (RayActorError, InfraFailure):
                return

        self._behind(call())

    def _behind(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def drain(self) -> None:
        """Wait for the counts that are on their way."""
        await asyncio.gather(*self._background, return_exceptions=True)

    # --- the rest -----------------------------------------------------------------------------------------------------------

    async def succeeded(self, retrieval_id: str, ids: Sequence[str]) -> int:
        """Tell that these neighbours of a retrieval were of use; counted once. Returns how many were new."""
        parts = self._by_shard(ids)
        return sum(await asyncio.gather(*(self._surely(n, "succeeded", retrieval_id, some) for n, some in parts.items())))

    async def get(self, id: str) -> Experience | None:
        """An experience, None when it is not (or no longer) there."""
        (row,) = await self._surely(shard_of(id, len(self.names)), "rows", [id])
        return experience(row) if row is not None else None

    async def pictures(self, id: str) -> dict[str, bytes]:
        """PNG bytes of an experience's pictures by image id."""
        return await self._surely(shard_of(id, len(self.names)), "pictures", id)

    async def list(self, limit: int, after: Place | None = None, user: str | None = None) -> list[Experience]:
        """At most ``limit`` experiences, newest first; only those that come after ``after``, or of ``user`` (pseudonym)."""
        found = [pair for part in await self._everywhere("list_rows", limit, after, user) for pair in part]
        found.sort(key=lambda pair: (-pair[0], pair[1][0]))
        return [experience(row) for _, row in found[:limit]]

    async def feedback(self, id: str, feedback: Feedback) -> Experience:
        """Add what somebody said of an answer; BadInput ``unknown_experience``."""
        await self._surely(shard_of(id, len(self.names)), "feedback", id, feedback)
        now = await self.get(id)
        if now is None:
            raise unknown(id)
        return now

    def withdraw(self, versions: Sequence[int]) -> None:
        """Let what these policy versions answered vote no more, and what others did vote again: in each shard once it answers."""

        async def tell(number: int) -> None:
            while self._withdrawn is wanted:
                with contextlib.suppress(InfraFailure):
                    return await self._surely(number, "withdraw", wanted)
                await asyncio.sleep(PAUSE_S)  # a disk that refuses does so at once

        wanted = self._withdrawn = list(versions)
        for number in range(len(self.names)):
            self._behind(tell(number))

    async def delete(self, ids: Sequence[str]) -> int:
        """Delete by id; returns how many there were."""
        self._size = (float("-inf"), self._size[1])
        return sum(await asyncio.gather(*(self._surely(n, "delete", some) for n, some in self._by_shard(ids).items())))

    async def delete_user(self, user: str) -> Ids:
        """Delete everything of a user (pseudonym) in every shard; InfraFailure when one stays away. Returns the ids."""
        self._size = (float("-inf"), self._size[1])
        return [id for part in await self._everywhere("delete_user", user) for id in part]

    async def prune(self, now: float) -> Ids:
        """Delete what is older than ``memory.retention_days``; returns the ids. Shards do so by themselves, too."""
        return [id for part in await self._everywhere("prune", now) for id in part]

    async def sample(self, n: int, seed: int | None = None) -> Experiences:
        """At most ``n`` experiences without replacement, by priority and success, over all shards as over one."""
        seeds = np.random.SeedSequence(seed).generate_state(len(self.names), np.uint64)
        drawn = await asyncio.gather(*(self._surely(i, "draw", n, int(s)) for i, s in enumerate(seeds)))
        first = [id for _, id in sorted(pair for part in drawn for pair in part)[:n]]
        found = await asyncio.gather(*(self.get(id) for id in first))
        return [one for one in found if one is not None]

    async def export(self, folder: str | Path) -> int:
        """Write ``shard-I.parquet`` files (on the shards' nodes); returns how many experiences."""
        paths = [str(Path(folder).absolute() / f"shard-{i}.parquet") for i in range(len(self.names))]
        return sum(await asyncio.gather(*(self._answer(i, "export", path) for i, path in enumerate(paths))))

    async def load(self, path: str | Path) -> int:
        """Add what a Parquet file holds, each to its shard; returns how many were new."""
        where, n = str(Path(path).absolute()), len(self.names)
        return sum(await asyncio.gather(*(self._answer(i, "load", where, i, n) for i in range(n))))

    async def stats(self) -> dict[str, float]:
        """``memory/...`` figures of all shards together, those that answer; times only where there are experiences."""
        until = time.monotonic() + max(1.0, self.config.timeout_s)
        answers = await self._in_time(dict.fromkeys(range(len(self.names)), ("stats",)), until)
        parts = list(answers.values())
        size = sum(p["size"] for p in parts)
        summed = ("size", "capacity", "added", "vectors", "waiting_for_index", "retrievals", "successes", "bytes")
        times = [(p["newest"], p["oldest"]) for p in parts if p["newest"] is not None]
        return {
            **{f"memory/{name}": sum(p[name] for p in parts) for name in summed},
            "memory/shards": len(self.names),
            "memory/shards_away": len(self.names) - len(parts),
            "memory/mean_priority": sum(p["mean_priority"] * p["size"] for p in parts) / max(size, 1),
            **({"memory/newest": max(t[0] for t in times), "memory/oldest": min(t[1] for t in times)} if times else {}),
        }

    async def size(self) -> int:
        """Experiences in all shards, about a second old or two; a shard that is away counts as it was."""
        age = time.monotonic() - self._size[0]
        if age == float("inf"):
            await self._count()
        elif age > SIZE_S:
            self._size = (time.monotonic(), self._size[1])
            self._behind(self._count())
        return sum(self._size[1])

    async def _count(self) -> None:
        until = time.monotonic() + max(1.0, self.config.timeout_s)
        answers = await self._in_time(dict.fromkeys(range(len(self.names)), ("stats",)), until)
        known = [answers[n]["size"] if n in answers else before for n, before in enumerate(self._size[1])]
        self._size = (time.monotonic(), known)


def merge(lists: Sequence[Near], k: int) -> Near:
    """The ``k`` best of several shards' results, best first."""
    return sorted((pair for one in lists for pair in one), key=lambda pair: -pair[1])[:k]


async def _result(ref: Awaitable[Any]) -> Any:
    """What an actor answered; errors of ours as themselves."""
    try:
        return await ref
    except RayTaskError as error:
        raise getattr(error, "cause", error) from None
