"""The embedded engine: batches of requests (waves) run with transformers in one worker thread.

A wave starts when all open sessions are waiting, when `max_num_seqs` are waiting, or when the oldest has
waited for `MAX_WAIT_S`. The worker thread uses only the model; sessions, queues and futures belong to the
event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pixelis.dialogue.session import Completion, SamplingParams, Start, TokenCallback
from pixelis.engines.decoding import Decoder, Past, Row
from pixelis.engines.engine import Engine, EngineSession
from pixelis.errors import InfraFailure, PixelisError
from pixelis.policy.adapters import is_vision
from pixelis.policy.lora import BaseWeights, merge_into
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint
from pixelis.policy.samples import view_digest

if TYPE_CHECKING:
    from pixelis import config
    from pixelis.policy.adapters import Adapter

MAX_WAIT_S = 0.25
SETTLE_S = 0.02
"""A wave waits this long after an outside agent's session was opened: those of a group come one by one."""
MAX_KEPT = 32
"""Most episodes whose keys and values wait for the next request of a client."""
Outcome = tuple[Completion, Past] | PixelisError
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Request:
    session: HfSession
    row: Row
    done: asyncio.Future[Completion]
    since: float


class HfSession(EngineSession):
    engine: HfEngine

    def __init__(self, engine: HfEngine, prefix_key: str | None, start: Start):
        super().__init__(engine, prefix_key, start)
        if start.alone:
            engine.alone_at = asyncio.get_running_loop().time()
        self.past: Past | None = None
        self.ids: list[int] = []
        self.digests: list[bytes] = []
        self.waiting: _Request | None = None

    async def generate(
        self,
        tokens: Sequence[int],
        views: Sequence[np.ndarray],
        sampling: SamplingParams,
        on_tokens: TokenCallback | None = None,
    ) -> Completion:
        self.check_turn(tokens, views, self.waiting is not None)
        given, past, earlier = tokens, self.past, list[bytes]()
        if not self.ids:
            tokens, views, past, earlier = self._recall(tokens, views)
        # Sessions of one key sample the same prompt: equal seeds must not give equal turns.
        stream = (self.engine.seed, self.engine.version, sampling.seed, self.start.ordinal, self.turns)
        row = Row(
            tokens, views, sampling, past, self.prefix_key, tuple(s & 0xFFFFFFFFFFFFFFFF for s in stream)
        )
        row.prompt = self.start.prompt if self.start.turns else None
        row.on_token = _once(on_tokens) if on_tokens is not None else None
        try:
            completion = await self.engine._submit(self, row)
        except asyncio.CancelledError:
            self.close()
            raise
        self.ids += [*given, *completion.tokens]
        self.digests += [*earlier, *row.digests]
        return completion

    def _recall(
        self, tokens: Sequence[int], views: Sequence[np.ndarray]
    ) -> tuple[Sequence[int], Sequence[np.ndarray], Past | None, list[bytes]]:
        """What of the first tokens and views is new after a kept past, if there is one, and its views' digests."""
        length, shown = self.start.so_far
        digests = [view_digest(view) for view in views[:shown]] if length else []
        past = self.engine._kept.pop((tuple(tokens[:length]), *digests), None)
        return (tokens, views, None, []) if past is None else (tokens[length:], views[shown:], past, digests)

    def keep(self) -> None:
        if self.past is not None and not self.closed:
            kept = self.engine._kept
            kept[(tuple(self.ids), *self.digests)] = self.past.alone()
            if len(kept) > MAX_KEPT:
                kept.pop(next(iter(kept)), None)

    def close(self) -> None:
        """Release the episode; the cache of a wave is freed with its last session."""
        if not self.closed:
            self.closed = True
            self.past = None
            self.engine._on_close(self)


class HfEngine(Engine[HfSession]):
    """Batched generation with transformers; see `engines.Engine`. Raises the errors of `load_model`."""

    session_kind = HfSession

    def __init__(
        self,
        model_folder: str | Path,
        policy: config.PolicyConfig,
        engine: config.EngineConfig,
        seed: int = 0,
    ):
        self.model, self.tokenizer, self.spec = load_model(policy, folder=model_folder)
        self.model.requires_grad_(False)
        self._device = next(self.model.parameters()).device
        self.spec.family.attend_cached(self.model)
        super().__init__(fingerprint(model_folder), drains=engine.on_update == "drain")
        self.max_num_seqs, self.seed = engine.max_num_seqs, seed
        self._decoder = Decoder(self.model, self.spec, self.tokenizer)
        self._base = BaseWeights()
        self._kept: dict[tuple[object, ...], Past] = {}
        # OpenMP's number of threads is a setting of each thread: set it in the worker.
        self._worker = ThreadPoolExecutor(
            1, "hf-engine", initializer=torch.set_num_threads, initargs=(engine.threads,)
        )
        self._pending: list[_Request] = []
        self._wave: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.alone_at = 0.0
        self.waves = 0

    async def load(self, version: int, adapter: Adapter | None) -> None:
        def merge() -> None:
            changed = set(self._base) | set(adapter.tensors if adapter is not None else ())
            merge_into(self.model, self._base, adapter)
            if any(map(is_vision, changed)):
                self._decoder.features.clear()

        async with self._loading(adapter):
            await asyncio.get_running_loop().run_in_executor(self._worker, merge)
            self._kept.clear()
            self.version = version

    async def _free(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._worker, self._move, torch.device("cpu"))

    async def _restore(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._worker, self._move, self._device)

    def _move(self, device: torch.device) -> None:
        if self._device.type == "cpu":
            return
        self._decoder.features.clear()
        self._kept.clear()
        self.model.to(device)
        for name, weight in self._base.items():
            self._base[name] = weight.to(device)
        torch.cuda.empty_cache()

    async def health(self) -> dict[str, object]:
        decoder = self._decoder
        self.tokens_read, self.tokens_reused = decoder.tokens_read, decoder.tokens_reused
        self.tokens_written = decoder.tokens_written
        return self._health("hf", len(self._pending), self._wave is not None, self.busy_s) | {
            "waves": self.waves
        }

    async def aclose(self) -> None:
        self._shutdown = True
        pending, self._pending = self._pending, []
        for request in pending:
            _fail(request, InfraFailure("the engine is shut down", code="engine_closed"))
        if self._wave is not None:
            await asyncio.wait([self._wave])
        for session in list(self._sessions):
            session.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _submit(self, session: HfSession, row: Row) -> Completion:
        self._check_alive()
        loop = asyncio.get_running_loop()
        request = _Request(session, row, loop.create_future(), loop.time())
        session.waiting = request
        self._pending.append(request)
        # Requests submitted in the same iteration of the event loop join the wave.
        loop.call_soon(self._start_wave)
        try:
            return await request.done
        finally:
            session.waiting = None
            if request in self._pending:  # cancelled
                self._pending.remove(request)

    def _on_close(self, session: HfSession) -> None:
        super()._on_close(session)
        if session.waiting is not None:
            if session.waiting in self._pending:
                self._pending.remove(session.waiting)
            _fail(session.waiting, InfraFailure("the session was closed", code="session_closed"))
        self._start_wave()

    def _start_wave(self) -> None:
        """Start a wave if it is due, else set a timer."""
        if self._wave is not None or not self._pending or self._shutdown:
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        now, waiting = loop.time(), len(self._pending)
        due = min(request.since for request in self._pending) + MAX_WAIT_S
        if waiting >= len(self._sessions):
            due = min(due, self.alone_at + SETTLE_S)
        if waiting < self.max_num_seqs and now < due:
            self._timer = loop.call_at(due + 1e-3, self._start_wave)
            return
        batch = sorted(self._pending, key=lambda request: request.row.sampling.priority)
        batch, self._pending = batch[: self.max_num_seqs], batch[self.max_num_seqs :]
        self._wave = loop.create_task(self._run(batch))

    async def _run(self, batch: list[_Request]) -> None:
        loop = asyncio.get_running_loop()
        started = time.perf_counter()
        try:
            outcomes = await loop.run_in_executor(
                self._worker, self._compute, [request.row for request in batch]
            )
        except BaseException as error:
            outcomes = [InfraFailure(f"the engine's worker failed: {error!r}")] * len(batch)
        self.busy_s += time.perf_counter() - started
        self.waves += 1
        for request, outcome in zip(batch, outcomes, strict=True):
            session = request.session
            if isinstance(outcome, PixelisError):
                self.failures += 1
                _fail(request, outcome)
            elif not request.done.done() and not session.closed:
                completion, session.past = outcome
                session.turns += 1
                self.rows_done += 1
                request.done.set_result(completion)
        self._wave = None
        # The sessions of this wave may submit their next request before the next wave starts.
        loop.call_soon(self._start_wave)

    def _compute(self, rows: list[Row]) -> list[Outcome]:
        """Runs in the worker thread; returns the result or error of each row."""
        outcomes, prepared = dict[int, Outcome](), list[int]()
        for i, row in enumerate(rows):
            try:
                self._decoder.prepare(row)
                prepared.append(i)
            except Exception as error:
                outcomes[i] = _typed(error)
        results = self._decode([rows[i] for i in prepared]) if prepared else []
        outcomes |= zip(prepared, results, strict=True)
        return [outcomes[i] for i in range(len(rows))]

    def _decode(self, rows: list[Row]) -> Sequence[Outcome]:
        try:
            return self._decoder.run(rows)
        except Exception as error:
            if self._kept:
                self._kept.clear()
                return self._decode(rows)
            if len(rows) == 1:
                return [_typed(error)]
            # Out of memory, or one bad row: smaller waves fit, and a bad row finally fails alone.
            log.warning("a wave of %d failed (%r): retrying in halves", len(rows), error)
            half = len(rows) // 2
            return [*self._decode(rows[:half]), *self._decode(rows[half:])]


def _once(on_tokens: TokenCallback) -> Callable[[int, int], None]:
    """A callback for the worker thread. A wave that is repeated in halves generates its tokens again."""
    loop, seen = asyncio.get_running_loop(), 0

    def on_token(step: int, token: int) -> None:
        nonlocal seen
        if step == seen:
            seen += 1
            loop.call_soon_threadsafe(on_tokens, [token])

    return on_token


def _typed(error: Exception) -> PixelisError:
    if isinstance(error, PixelisError):
        return error
    log.error("a request failed", exc_info=error)
    return InfraFailure(f"generation failed: {error!r}")


def _fail(request: _Request, error: PixelisError) -> None:
    if not request.done.done():
        request.done.set_exception(error)
