"""The interface of the engines and what they share: sessions, checks of requests, loading, sleep, health."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from pixelis.dialogue.session import Start
from pixelis.errors import BadInput, InfraFailure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pixelis.families.family import ModelSpec
    from pixelis.policy.adapters import Adapter


class EngineSession:
    """One episode; see `dialogue.session.Session`."""

    def __init__(self, engine: Any, prefix_key: str | None, start: Start):
        self.engine, self.prefix_key, self.start = engine, prefix_key, start
        self.turns, self.closed = start.turns, False

    def keep(self) -> None:
        """Does nothing in an engine with a cache of its own."""

    def check_turn(self, tokens: Sequence[int], views: Sequence[np.ndarray], busy: bool) -> None:
        """Raise InfraFailure if the session is closed, BadInput if it is busy or the request is invalid."""
        if self.closed:
            raise InfraFailure("the session is closed", code="session_closed")
        if busy:
            raise BadInput("a session generates one turn at a time: await the last `generate` first")
        if not len(tokens):
            raise BadInput("no new tokens: the policy would generate two turns in a row")
        if min(tokens) < 0 or max(tokens) >= self.engine.spec.vocab:
            raise BadInput("a token is not in the vocabulary")
        for view in views:
            if view.ndim != 3 or view.shape[2] != 3 or view.dtype != np.uint8:
                raise BadInput(f"a view must be uint8 [h, w, 3], not {view.dtype} {list(view.shape)}")


S = TypeVar("S", bound=EngineSession)


class Engine(ABC, Generic[S]):
    """Generates turns for concurrent sessions of one version. drains: a load waits for open sessions.

    ``seed`` contributes to the random numbers of every session.
    """

    session_kind: type[S]
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec

    def __init__(self, base_sha256: str, drains: bool):
        self.base_sha256, self.drains = base_sha256, drains
        self._sessions: set[S] = set()
        self._keys: dict[str, list[int]] = {}  # [sessions so far, open sessions]
        self._may_open, self._idle, self._load_lock = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._awake = asyncio.Event()
        for event in (self._may_open, self._idle, self._awake):
            event.set()
        self._shutdown = False
        self.version = self.rows_done = self.failures = 0
        self.tokens_read = self.tokens_reused = self.tokens_written = 0
        self.busy_s = 0.0

    def _check_alive(self) -> None:
        """Raise InfraFailure when the engine cannot serve."""
        if self._shutdown:
            raise InfraFailure("the engine is shut down", code="engine_closed")

    async def open(self, prefix_key: str | None = None, start: Start | None = None) -> S:
        """Open a session; waits while a `load` is pending.

        Sessions with equal keys must have equal first prompts (tokens and views), which are then prefilled
        once. start: by default at the first prompt, numbered among the open sessions of its key.
        """
        while not self._may_open.is_set():
            await self._may_open.wait()
        self._check_alive()
        counts = self._keys.setdefault(prefix_key, [0, 0]) if prefix_key is not None else [0, 0]
        session = self.session_kind(self, prefix_key, start or Start(counts[0]))
        counts[0] += 1
        counts[1] += 1
        self._sessions.add(session)
        self._idle.clear()
        return session

    def _on_close(self, session: S) -> None:
        self._sessions.discard(session)
        if session.prefix_key is not None:
            counts = self._keys[session.prefix_key]
            counts[1] -= 1
            if not counts[1]:
                del self._keys[session.prefix_key]
        if not self._sessions:
            self._idle.set()

    def _health(self, name: str, pending: int, busy: bool, busy_s: float) -> dict[str, object]:
        return {
            "engine": name,
            "version": self.version,
            "sessions": len(self._sessions),
            "pending": pending,
            "busy": busy,
            "loading": not (self._may_open.is_set() or self.asleep),
            "asleep": self.asleep,
            "rows": self.rows_done,
            "failures": self.failures,
            "busy_s": round(busy_s, 3),
            "tokens_read": self.tokens_read,
            "tokens_reused": self.tokens_reused,
            "tokens_written": self.tokens_written,
        }

    @property
    def asleep(self) -> bool:
        return not self._awake.is_set()

    async def sleep(self) -> None:
        """Idempotent: free the accelerator once no session is open; `open` and `load` wait for `wake`."""
        async with self._load_lock:
            if self.asleep:
                return
            self._may_open.clear()
            try:
                await self._idle.wait()
                self._check_alive()
                await self._free()
            except BaseException:
                self._may_open.set()
                raise
            self._awake.clear()

    async def wake(self) -> None:
        """Continue with the weights from before `sleep`. Idempotent."""
        async with self._load_lock:
            if self.asleep:
                await self._restore()
                self._awake.set()
                self._may_open.set()

    @abstractmethod
    async def load(self, version: int, adapter: Adapter | None) -> None:
        """Switch to another version (None: the base model). Raises BadInput for a foreign adapter.

        `engine.on_update=drain` waits until no session is open. `keep` switches between two turns (`hf`) or
        tokens (`vllm`) of open sessions, which keep the old keys and values; log-probs are those at sampling
        time.
        """

    @abstractmethod
    async def health(self) -> dict[str, object]:
        """Version, load and counters; available while the engine is busy."""

    @abstractmethod
    async def aclose(self) -> None:
        """Fail pending requests and release the engine. Idempotent."""

    @abstractmethod
    async def _free(self) -> None:
        """Move the weights from the accelerator and drop what is cached there."""

    @abstractmethod
    async def _restore(self) -> None:
        """Undo `_free`."""

    @asynccontextmanager
    async def _loading(self, adapter: Adapter | None) -> AsyncIterator[None]:
        """Let the weights change in the block: one load at a time, and no open session if the engine drains."""
        if adapter is not None and adapter.base_sha256 and adapter.base_sha256 != self.base_sha256:
            message = "the adapter was trained on another base model"
            raise BadInput(message, code="foreign_adapter", fix="use the same policy.model")
        while True:
            await self._awake.wait()
            async with self._load_lock:
                if self.asleep:
                    continue
                self._may_open.clear()
                try:
                    if self.drains:
                        await self._idle.wait()
                    self._check_alive()
                    yield
                finally:
                    self._may_open.set()
            return
