"""Searches the memory for similar questions while the samples are generated."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from ray.exceptions import RayError

from pixelis.actors.cluster import actor_handle
from pixelis.actors.memory import Memory, SearchResult
from pixelis.config import Config
from pixelis.errors import InfraFailure, PixelisError
from pixelis.evolution import privacy
from pixelis.records import Neighbour, Question, new_id
from pixelis.serve.agent_types import Backends
from pixelis.telemetry import tracing

log = logging.getLogger(__name__)

Search = asyncio.Task[tuple[Question, SearchResult]]


class Lookup:
    """A search in progress. ``wait`` sets its results; ``partial``: a shard did not answer in time.

    ``vector`` is the question's, stored with the experience; ``stored_question`` is redacted like stored
    questions.
    """

    def __init__(self, vector: asyncio.Task[np.ndarray] | None, search: Search | None, until: float):
        self.vector, self.search, self.until = vector, search, until
        self.stored_question: Question | None = None
        self.neighbours: list[Neighbour] = []
        self.retrieval_id = ""
        self.partial = False

    async def wait(self) -> None:
        if self.search is None:
            return
        await asyncio.wait([self.search], timeout=max(0.0, self.until - time.monotonic()))
        if not self.search.done() or self.search.cancelled() or self.search.exception() is not None:
            self.partial = True
            return
        self.stored_question, result = self.search.result()
        self.neighbours = result.neighbours
        self.retrieval_id = result.retrieval_id
        self.partial = result.partial


class Retrieval:
    """The clients of the memory shards and the Embedder."""

    def __init__(self, config: Config, backends: Backends, counts: Counter[str]):
        self.config, self.backends, self.counts = config, backends, counts
        self.embedder: Any = None
        self.memory: Memory | None = None
        if backends.memory and config.memory.enabled:
            self.memory = Memory(backends.memory, backends.namespace, config.memory)

    @property
    def writes(self) -> bool:
        return self.memory is not None and not self.config.serve.read_only

    async def ready(self) -> None:
        if self.memory is not None and self.backends.embedder is not None:
            question = Question(id=new_id("q"), question="?", task="serve", split="serve")
            await asyncio.gather(self.vector(question, [np.zeros((64, 64, 3), np.uint8)]), self.memory.size())

    async def cold(self) -> bool:
        """Whether the memory holds fewer than ``evolution.cold_start`` experiences."""
        threshold = self.config.evolution.cold_start
        if not (threshold and self.writes and self.config.learns_online):
            return False
        assert self.memory is not None
        try:
            async with asyncio.timeout(self.config.memory.timeout_s):
                return await self.memory.size() < threshold
        except (TimeoutError, RayError, InfraFailure):
            self.counts["memory_unreachable"] += 1  # the samples can still vote
            return False

    @contextmanager
    def lookup(
        self, question: Question, views: Sequence[np.ndarray], search: bool, store: bool
    ) -> Iterator[Lookup]:
        """Embed the question with its ``views``, and search the memory, while the context runs.

        Its end cancels the search, but not the vector, which the experience needs. Without ``store`` nothing
        is written, not even that a search took place.
        """
        k = self.config.evolution.neighbours.k
        search = search and k > 0 and self.memory is not None and self.config.evolution.enabled
        vector: asyncio.Task[np.ndarray] | None = None
        task: Search | None = None
        if self.backends.embedder is not None and (search or (store and self.writes)):
            vector = asyncio.create_task(self.vector(question, views))
            vector.add_done_callback(self._count_failure)
            if search:
                task = asyncio.create_task(self._search(vector, question, k, store))
                task.add_done_callback(self._count_failure)
        try:
            yield Lookup(vector, task, time.monotonic() + self.config.memory.timeout_s)
        finally:
            if task is not None:
                task.cancel()

    async def _search(
        self, vector: asyncio.Task[np.ndarray], question: Question, k: int, store: bool
    ) -> tuple[Question, SearchResult]:
        assert self.memory is not None
        query = question.model_copy(update={"media": []})
        with tracing.span("search", k=k) as span:
            redacted = await asyncio.to_thread(privacy.redact_record, query)
            result = await self.memory.search(await asyncio.shield(vector), k, track=self.writes and store)
            span.set_attribute("pixelis.neighbours", len(result.neighbours))
        return redacted.model_copy(update={"media": question.media}), result

    async def vector(self, question: Question, views: Sequence[np.ndarray]) -> np.ndarray:
        """Raises InfraFailure without an Embedder."""
        if self.embedder is None:
            name = self.backends.embedder or ""
            self.embedder = await asyncio.to_thread(actor_handle, name, self.backends.namespace)
        try:
            with tracing.span("embed"):
                return await self.embedder.question_vector.remote(question, views)
        except RayError:
            self.embedder = None
            raise

    def _count_failure(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counts["lookup_failed"] += 1
            reason = error if isinstance(error, PixelisError) else type(error).__name__
            log.warning("memory lookup failed, the samples vote without neighbours: %s", reason)
