"""What an engine with vLLM shares, whether vLLM runs in this process's care or as a server: sessions, requests, replies."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from pixelis.dialogue.session import MIN_TEMPERATURE, Completion, SamplingParams, Start, TokenCallback
from pixelis.engines.engine import Engine, EngineSession
from pixelis.engines.vllm_files import collapse
from pixelis.errors import BadInput, DeadlineExceeded, InfraFailure, PixelisError
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.policy.export import BaseFile
from pixelis.policy.model_path import fingerprint
from pixelis.policy.samples import once_per_view, view_digest

if TYPE_CHECKING:
    from pixelis import config

MAX_TEMPERATURE = 2.0
_picture = once_per_view(Image.fromarray)


class VllmSession(EngineSession):
    """One episode: its ids and pictures. vLLM stores the keys and values."""

    engine: VllmSessions

    def __init__(self, engine: VllmSessions, prefix_key: str | None, start: Start):
        super().__init__(engine, prefix_key, start)
        self.ids: list[int] = []
        self.short: list[int] = []
        self.pictures: list[Image.Image] = []
        self.digests: list[str] = []
        self.position = self.origin = 0
        self.loads = engine._loads
        self.task: asyncio.Task[Completion] | None = None

    async def generate(
        self,
        tokens: Sequence[int],
        views: Sequence[np.ndarray],
        sampling: SamplingParams,
        on_tokens: TokenCallback | None = None,
    ) -> Completion:
        """See `Session.generate`; no tokens and `length` at once if the episode fills the context."""
        self.check_turn(tokens, views, self.task is not None)
        spec = self.engine.spec
        if sampling.temperature and not MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
            raise BadInput(f"vLLM supports temperature 0 and {MIN_TEMPERATURE} to {MAX_TEMPERATURE}")
        self.engine.check_views(len(self.pictures), views)
        sizes = [(view.shape[0], view.shape[1]) for view in views]
        _, position = spec.family.positions(spec, np.asarray(tokens), sizes, self.position)
        ids, short, pictures = len(self.ids), len(self.short), len(self.pictures)
        # vLLM expands the pictures' tokens, and its prompt is compared with ours afterwards.
        pieces = [spec.family.image_ids(spec, *size) for size in sizes]
        self.short += collapse(tokens, pieces, spec.family.vllm_image(spec))
        self.ids += (int(token) for token in tokens)
        self.pictures += map(_picture, views)
        self.digests += [view_digest(view).hex() for view in views]
        if not ids:
            length, views_shown = self.start.prompt if self.start.turns else (None, None)
            self.origin = _number(self.ids[:length], self.digests[:views_shown])
        self.task = asyncio.create_task(self.engine.complete(self, sampling, on_tokens))
        try:
            completion = await self.task
        except BaseException as error:
            # As before the call, so that it can be repeated.
            del self.ids[ids:], self.short[short:], self.pictures[pictures:], self.digests[pictures:]
            if isinstance(error, asyncio.CancelledError):
                current = asyncio.current_task()
                if self.closed and not (current is not None and current.cancelling()):
                    raise InfraFailure("the session was closed", code="session_closed") from None
                self.close()
            raise
        finally:
            self.task = None
        self.ids += completion.tokens
        self.short += completion.tokens
        self.position = position + len(completion.tokens)
        self.turns += 1
        return completion

    def close(self) -> None:
        """Release the episode; cancels a turn in progress. Idempotent."""
        if not self.closed:
            self.closed = True
            if self.task is not None:
                self.task.cancel()
            self.engine._on_close(self)


@dataclass
class Reply:
    """vLLM's answer to a turn. prompt: after the expansion of pictures; likely: of each token the entries (id,
    log-probability, rank) that vLLM returned, the sampled one among them; prompt_log_probs: of the last
    tokens of the prompt, as many as were asked for; cached: tokens that were not computed again.
    """

    prompt: list[int]
    tokens: list[int]
    finish_reason: str | None
    likely: list[list[tuple[int, float, int]]]
    prompt_log_probs: list[float] = field(default_factory=list)
    cached: int = 0


class VllmSessions(Engine[VllmSession]):
    """An engine whose sessions send their whole episode to vLLM with every turn.

    The pixel budgets, number of images and context of ``dialogue`` are its limits.
    """

    session_kind = VllmSession

    def __init__(
        self,
        model_folder: Path,
        policy: config.PolicyConfig,
        engine: config.EngineConfig,
        dialogue: config.DialogueConfig,
        seed: int,
    ):
        self.tokenizer = load_tokenizer(model_folder)
        self.spec = load_spec(model_folder, self.tokenizer, policy.family)
        super().__init__(fingerprint(model_folder), drains=engine.on_update == "drain")
        self.seed = seed
        self.max_context = dialogue.max_context
        self.max_images = dialogue.max_images
        self.timeout_s = engine.timeout_s
        budgets = dialogue.input, dialogue.crop, dialogue.frame
        self.max_pixels = max(self.spec.multiple**2, *(budget.max_pixels for budget in budgets))
        self._base = BaseFile(model_folder, self.spec.family)
        self._loads = self._pending = 0
        self._since = 0.0

    def check_views(self, images: int, views: Sequence[np.ndarray]) -> None:
        """Raise BadInput for views that vLLM would resize or refuse; `images` counts earlier views."""
        if views and not self.spec.reads_images:
            raise BadInput(f"a model of type {self.spec.family_name} reads text alone", code="no_vision")
        if images + len(views) > self.max_images:
            raise BadInput(f"more images in an episode than dialogue.max_images = {self.max_images}")
        for view in views:
            if view.shape[0] * view.shape[1] > self.max_pixels:
                raise BadInput(f"a view exceeds the largest budget, {self.max_pixels} pixels")

    async def complete(
        self, session: VllmSession, sampling: SamplingParams, on_tokens: TokenCallback | None
    ) -> Completion:
        self._check_alive()
        if (count := sampling.given_log_probs) and count >= len(session.ids):
            raise BadInput(f"no log-probs of {count} of {len(session.ids)} tokens")
        room = self.max_context - len(session.ids)
        if room < 1:
            if sampling.given_log_probs:
                raise BadInput("the tokens fill the context", code="over_context")
            return Completion([], [], "length")
        if not self._pending:
            self._since = time.perf_counter()
        self._pending += 1
        try:
            async with asyncio.timeout(self.timeout_s):
                reply = await self._request(session, sampling, min(room, sampling.max_tokens), on_tokens)
            completion = self._read(session, reply, sampling)
        except Exception as error:
            self.failures += 1
            if isinstance(error, PixelisError):
                raise
            if isinstance(error, TimeoutError):
                message = f"a turn took longer than engine.timeout_s = {self.timeout_s:g} s"
                raise DeadlineExceeded(message) from None
            message = f"vLLM failed: {self._failure() or repr(error)}"
            raise InfraFailure(message, code="engine_failed") from error
        finally:
            self._pending -= 1
            if not self._pending:
                self.busy_s += time.perf_counter() - self._since
        self.rows_done += 1
        self.tokens_written += len(completion.tokens)
        self.tokens_reused += reply.cached
        self.tokens_read += len(session.ids) - reply.cached
        return completion

    @abstractmethod
    async def _request(
        self, session: VllmSession, sampling: SamplingParams, room: int, on_tokens: TokenCallback | None
    ) -> Reply:
        """Have vLLM generate at most ``room`` tokens. Raises BadInput for a refused request."""

    def _settings(self, session: VllmSession, sampling: SamplingParams, room: int) -> dict[str, Any]:
        """vLLM's sampling parameters of a turn."""
        # Sessions of one key sample the same prompt: equal seeds must not give equal turns.
        stream = (
            self.seed,
            self.version,
            sampling.seed,
            session.start.ordinal,
            session.turns,
            session.origin,
        )
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": room,
            "seed": _number(stream) % 2**63,
            "stop_token_ids": [self.spec.stop],
            "ignore_eos": True,
            "logprobs": sampling.top_log_probs,
            "prompt_logprobs": 0 if sampling.given_log_probs else None,
            "stop": sampling.stop or None,
            "include_stop_str_in_output": True,
            "detokenize": bool(sampling.stop),
        }

    def _read(self, session: VllmSession, reply: Reply, sampling: SamplingParams) -> Completion:
        """Raises InfraFailure for another prompt or an incomplete reply."""
        if reply.prompt != session.ids:
            message = "vLLM's prompt differs from the episode's tokens and pictures"
            raise InfraFailure(message, code="prompt_mismatch")
        tokens, top = reply.tokens, sampling.top_log_probs
        if reply.finish_reason not in ("stop", "length") or not tokens or len(reply.likely) != len(tokens):
            message = f"{reply.finish_reason!r}, {len(tokens)} tokens and {len(reply.likely)} log-probs"
            raise InfraFailure(f"vLLM ended a request with {message}", code="engine_failed")
        log_probs = [
            next(value for id, value, _ in entry if id == token)
            for token, entry in zip(tokens, reply.likely, strict=True)
        ]
        # vLLM adds the sampled token whatever its rank; outside top_p log-probabilities are -inf.
        likely = [
            [(id, value) for id, value, rank in entry if rank <= top and math.isfinite(value)]
            for entry in (reply.likely if top else ())
        ]
        top_log_probs = [sorted(pairs, key=lambda pair: -pair[1]) for pairs in likely]
        stopped = tokens[-1] == self.spec.stop or reply.finish_reason == "stop"
        return Completion(
            tokens, log_probs, "stop" if stopped else "length", top_log_probs, reply.prompt_log_probs
        )

    @abstractmethod
    def _failure(self) -> str | None:
        """Why the engine cannot serve, None if it can."""

    def _check_alive(self) -> None:
        super()._check_alive()
        if (reason := self._failure()) is not None:
            raise InfraFailure(
                f"vLLM cannot serve: {reason}", code="engine_dead", fix="restart the generator"
            )

    async def health(self) -> dict[str, object]:
        busy = time.perf_counter() - self._since if self._pending else 0.0
        health = self._health("vllm", self._pending, self._pending > 0, self.busy_s + busy)
        return health | {"alive": self._failure() is None}

    async def _end_sessions(self) -> None:
        """Close all sessions and wait for their turns."""
        tasks = [session.task for session in self._sessions if session.task is not None]
        for session in list(self._sessions):
            session.close()
        if tasks:
            await asyncio.wait(tasks, timeout=5)


def _number(*values: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big")
