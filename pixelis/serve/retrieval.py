"""Looks up similar questions in memory while the samples are drawn."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis.actors.memory import Found, Memory
from pixelis.config import Config
from pixelis.errors import InfraFailure, PixelisError
from pixelis.evolution import privacy
from pixelis.records import Neighbour, Question, new_id
from pixelis.serve.backends import Backends

log = logging.getLogger(__name__)

Search = asyncio.Task[tuple[Question, Found]]


class Lookup:
    """One search: its result once ``wait`` has returned, and the question's vector, which an experience is kept with.

    ``asked`` is the question as those found were stored, redacted. ``partial``: some or all of the memory did not answer in time.
    """

    def __init__(self, vector: asyncio.Task[np.ndarray] | None, search: Search | None, until: float):
        self.vector, self.search, self.until = vector, search, until
        self.asked: Question | None = None
        self.neighbours: list[Neighbour] = []
        self.retrieval_id = ""
        self.partial = False

    async def wait(self) -> None:
        """Take what was found: by now, or by ``until`` (monotonic seconds) if that is later."""
        if self.search is None:
            return
        await asyncio.wait([self.search], timeout=max(0.0, self.until - time.monotonic()))
        if not self.search.done() or self.search.cancelled() or self.search.exception() is not None:
            self.partial = True
            return
        self.asked, found = self.search.result()
        self.neighbours, self.retrieval_id, self.partial = found.neighbours, found.retrieval_id, found.partial


class Retrieval:
    """The memory's client and the Embedder, from the side of a request. Without shards there is nothing to recall."""

    def __init__(self, config: Config, backends: Backends, counts: Counter[str]):
        self.config, self.backends, self.counts = config, backends, counts
        self.embedder: ActorHandle | None = None
        self.memory: Memory | None = None
        if backends.memory and config.memory.enabled:
            self.memory = Memory(backends.memory, backends.namespace, config.memory)

    @property
    def writes(self) -> bool:
        """Whether anything may be written: never in a read-only service, which has no cold start either."""
        return self.memory is not None and not self.config.serve.read_only

    async def ready(self) -> None:
        """Meet the memory and the Embedder once, which takes longer than it ever will again."""
        if self.memory is not None and self.backends.embedder is not None:
            first = Question(id=new_id("q"), question="?", task="serve", split="serve")
            await asyncio.gather(self._vector(first, [np.zeros((64, 64, 3), np.uint8)]), self.memory.size())

    async def cold(self) -> bool:
        """Whether the memory holds too little for a vote with neighbours or an update; never without memory and evolution."""
        threshold = self.config.evolution.cold_start
        if not (threshold and self.writes and self.config.evolution.enabled):
            return False
        assert self.memory is not None
        try:
            async with asyncio.timeout(self.config.memory.timeout_s):
                return await self.memory.size() < threshold
        except (TimeoutError, RayError, InfraFailure):
            self.counts["memory_unreachable"] += 1  # nothing is known of its size; the samples can still vote
            return False

    @contextmanager
    def look(self, question: Question, views: Sequence[np.ndarray], search: bool, keep: bool) -> Iterator[Lookup]:
        """Begin to look by the question and the ``views`` of its pictures.

        What is still searched for at the end is given up, the vector (wanted later) is not. Without ``keep`` nothing is written,
        not even that somebody looked.
        """
        k = self.config.evolution.neighbours.k
        search = search and k > 0 and self.memory is not None and self.config.evolution.enabled
        vector = None
        if self.backends.embedder is not None and (search or (keep and self.writes)):
            vector = asyncio.create_task(self._vector(question, views))
            vector.add_done_callback(self._heard)
        found = asyncio.create_task(self._search(vector, question, k, keep)) if search and vector is not None else None
        if found is not None:
            found.add_done_callback(self._heard)
        try:
            yield Lookup(vector, found, time.monotonic() + self.config.memory.timeout_s)
        finally:
            if found is not None:
                found.cancel()

    async def _search(self, vector: asyncio.Task[np.ndarray], question: Question, k: int, keep: bool) -> tuple[Question, Found]:
        assert self.memory is not None
        text = await asyncio.to_thread(privacy.redact, question.question)
        found = await self.memory.search(await asyncio.shield(vector), k, track=self.writes and keep)
        return question.model_copy(update={"question": text}), found

    async def _vector(self, question: Question, views: Sequence[np.ndarray]) -> np.ndarray:
        actor = await self._embedder()
        try:
            return await actor.question_vector.remote(question, views)
        except RayError:
            self.embedder = None
            raise

    async def _embedder(self) -> Any:
        if self.embedder is None:
            name = self.backends.embedder or ""
            try:
                self.embedder = await asyncio.to_thread(ray.get_actor, name, self.backends.namespace)
            except ValueError:
                raise InfraFailure(f"no Embedder named {name} is running") from None
        return self.embedder

    def _heard(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counts["lookup_failed"] += 1
            log.warning("lookup failed: %s", error if isinstance(error, PixelisError) else type(error).__name__)
