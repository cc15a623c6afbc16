"""The HTTP gateway on Ray Serve: OpenAI-shaped routes, keys, caps, a bounded queue and deadlines. It holds no model.

A request passes: key, content type, admission (429 before a byte of the body is read), body cap while reading, schema,
picture caps before decoding, a slot, the agent, the reply. Every failure is an OpenAI-shaped error; none shows internals.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.exceptions import RayError, RayTaskError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pixelis.config import Config
from pixelis.engines import SamplingParams
from pixelis.errors import BadInput, InfraFailure, Overloaded
from pixelis.serve import schemas
from pixelis.serve.agent import Agent, Answer, Ask
from pixelis.serve.schemas import AgentReply, AgentRequest, ApiError, ChatRequest, EvolutionStatus

log = logging.getLogger(__name__)

HEALTH_CACHE_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class Admission:
    """A bounded queue: ``running`` requests work, ``waiting`` more may wait, the next is refused at once."""

    def __init__(self, running: int, waiting: int):
        self.slots, self.capacity, self.running = asyncio.Semaphore(running), running + waiting, running
        self.inside = 0
        self.shed = 0
        self.mean_s = 1.0

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Count the request in. Raises Overloaded with the time in which the queue should have moved."""
        if self.inside >= self.capacity:
            self.shed += 1
            wait = self.mean_s * (self.inside - self.running + 1) / self.running
            raise Overloaded("too many requests are waiting", retry_after_s=min(max(wait, 1.0), MAX_RETRY_AFTER_S))
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a free slot, and learn from how long it was held."""
        async with self.slots:
            started = time.monotonic()
            yield
            self.mean_s += 0.1 * (time.monotonic() - started - self.mean_s)


def running_limit(config: Config) -> int:
    """Requests that the generators can decode together: rows of all engines over samples of a request."""
    return max(1, config.engine.workers * config.engine.max_rows // config.serve.samples)


def model_name(config: Config) -> str:
    """The id under ``/v1/models``: ``pixelis-nano``, or the name of the model's folder."""
    return "pixelis-nano" if config.policy.model == "nano" else Path(config.policy.model).name


def digest(key: str) -> bytes:
    """What is kept of the API key: enough to compare, useless to whoever reads an actor's arguments."""
    return hashlib.sha256(key.encode()).digest()


class Endpoints:
    """The routes, on any ASGI server; ``key_digest`` None asks for no key."""

    def __init__(self, config: Config, agent: Agent, key_digest: bytes | None):
        self.config, self.agent, self.key_digest = config, agent, key_digest
        self.model = model_name(config)
        self.created = int(time.time())
        self.admission = Admission(running_limit(config), config.serve.max_queue)
        self.health_cache: tuple[float, list[dict[str, Any]]] = (-HEALTH_CACHE_S, [])
        self.health_lock = asyncio.Lock()

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(title="Pixelis", docs_url=None, redoc_url=None, openapi_url=None)
        routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/agent", self.ask_agent),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name}", self.models),
            ("GET", "/v1/evolution", self.evolution),
            ("GET", "/healthz", self.health),
        ]
        for method, path, handler in routes:
            app.add_route(path, _guarded(handler), methods=[method])
        app.add_exception_handler(HTTPException, _http_error)
        return app

    # -- routes -----------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        started = time.monotonic()

        async def run(body: bytes) -> Response:
            wanted = schemas.parse(ChatRequest, body)
            if wanted.model not in (self.model, self.config.policy.model):
                message = f"the model `{wanted.model[:100]}` is not served here, `{self.model}` is"
                raise ApiError(404, message, "model_not_found", "model")
            asked = self._ask(wanted, max_tokens=wanted.max_completion_tokens or wanted.max_tokens, top_p=wanted.top_p)
            answer = await self._answer(asked)
            usage = schemas.usage_of(answer.group.trajectories)
            version = answer.group.policy_version
            reply = schemas.chat_reply(self.model, answer.verdict, answer.winner, version, usage, time.monotonic() - started)
            if not wanted.stream:
                return JSONResponse(reply)
            with_usage = wanted.stream_options is not None and wanted.stream_options.include_usage
            return _sse(schemas.chat_chunks(reply, with_usage))

        return await self._admitted(request, run)

    async def ask_agent(self, request: Request) -> Response:
        """``POST /v1/agent``."""
        started = time.monotonic()

        async def run(body: bytes) -> Response:
            wanted = schemas.parse(AgentRequest, body)
            if wanted.samples is not None and wanted.samples > self.config.serve.samples:
                raise ApiError(400, f"`samples` is at most {self.config.serve.samples}", "invalid_value", "samples")
            if wanted.max_turns is not None and wanted.max_turns > self.config.dialogue.max_turns_test:
                raise ApiError(400, f"`max_turns` is at most {self.config.dialogue.max_turns_test}", "invalid_value", "max_turns")
            asked = self._ask(wanted, wanted.samples, wanted.operations, wanted.max_turns, wanted.learn)
            answer = await self._answer(asked)
            reply = AgentReply(
                model=self.model,
                answer=answer.verdict.answer,
                confidence=answer.verdict.confidence,
                verdict=answer.verdict,
                trajectory=schemas.without_tokens(answer.winner, await self.agent.pictures(answer)),
                policy_version=answer.group.policy_version,
                seconds=time.monotonic() - started,
            )
            return JSONResponse(reply.model_dump(mode="json"))

        return await self._admitted(request, run)

    async def models(self, request: Request) -> Response:
        """``GET /v1/models`` and ``/v1/models/{name}``."""
        self._authorise(request)
        card = {"id": self.model, "object": "model", "created": self.created, "owned_by": "pixelis"}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [card]})
        if name != self.model:
            raise ApiError(404, f"the model `{name[:100]}` is not served here, `{self.model}` is", "model_not_found", "model")
        return JSONResponse(card)

    async def evolution(self, request: Request) -> Response:
        """``GET /v1/evolution``: status only."""
        self._authorise(request)
        stats = await self.agent.evolution_stats()
        version = self.agent.version
        if version is None:  # nothing answered yet: ask the generators
            known = [h["version"] for h in await self._health() if isinstance(h.get("version"), int)]
            version = max(known, default=None)
        counts = {**stats, **self.agent.counts, "shed": self.admission.shed, "inside": self.admission.inside}
        enabled = self.config.evolution.enabled and self.agent.evolution_name is not None
        status = EvolutionStatus(
            enabled=enabled, policy_version=version, updates=stats.get("updates", 0), queue=stats.get("queue", 0), counts=counts
        )
        return JSONResponse(status.model_dump(mode="json"))

    async def health(self, request: Request) -> Response:
        """``GET /healthz``: 200 while at least one generator answers, 503 otherwise. Needs no key, tells no more than that."""
        able = len(await self._health())
        status = {"status": "ok" if able else "no generator answers", "generators": able}
        return JSONResponse(status, status_code=200 if able else 503)

    async def _health(self) -> list[dict[str, Any]]:
        async with self.health_lock:  # open to anyone, so never more than one question a second
            at, known = self.health_cache
            if time.monotonic() - at >= HEALTH_CACHE_S:
                known = await self.agent.pool.health()
                self.health_cache = (time.monotonic(), known)
            return known

    # -- the way of a request ---------------------------------------------------------------------------------------

    async def _admitted(self, request: Request, run: Callable[[bytes], Awaitable[Response]]) -> Response:
        """Key, content type, admission, the body under its cap, then ``run(body)``; all within ``serve.timeout_s``."""
        self._authorise(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # also keeps web pages of other origins from posting without a preflight
            raise ApiError(415, "the content type must be application/json", "content_type")
        limit_s = self.config.serve.timeout_s
        body: bytes | None = None
        with self.admission.enter():
            try:
                async with asyncio.timeout(limit_s):
                    body = await self._read(request)
                    return await run(body)
            except TimeoutError:
                if body is None:
                    raise ApiError(408, f"the request's body did not arrive in {limit_s:g} s", "request_timeout") from None
                raise ApiError(504, f"no answer within {limit_s:g} s", "timeout", retry_after_s=1.0) from None

    def _authorise(self, request: Request) -> None:
        if self.key_digest is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Header bytes arrive as latin-1 text; digests have one length, so the comparison tells nothing about the key.
        presented = hashlib.sha256(given.strip().encode("latin-1", "replace")).digest()
        if not hmac.compare_digest(presented, self.key_digest) or scheme.lower() != "bearer":
            raise ApiError(401, "a valid API key is needed: `Authorization: Bearer KEY`", "invalid_api_key")

    async def _read(self, request: Request) -> bytes:
        """The body, refused as soon as it is known or seen to pass the cap (chunked bodies announce no length)."""
        cap = self.config.serve.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {cap} bytes", "body_too_large")
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > cap:
            raise too_large
        body = bytearray()
        try:
            async for chunk in request.stream():
                if len(body) + len(chunk) > cap:
                    raise too_large
                body += chunk
        except ClientDisconnect:
            raise ApiError(400, "the connection ended before the body did", "client_disconnected") from None
        return bytes(body)

    def _ask(
        self,
        wanted: ChatRequest | AgentRequest,
        samples: int | None = None,
        operations: bool = True,
        max_turns: int | None = None,
        learn: bool = True,
        max_tokens: int | None = None,
        top_p: float | None = None,
    ) -> Ask:
        """A checked Ask. Raises ApiError 400 for what is wrong with the question or its pictures' addresses."""
        c = self.config
        question, images = wanted.ask()
        schemas.check_question(question, c.serve.max_question_chars, wanted.question_param)
        schemas.check_images(images, c.dialogue.max_images, wanted.image_param)
        default = c.serve.sampling
        temperature = default.temperature if wanted.temperature is None else wanted.temperature
        top_p = default.top_p if top_p is None else top_p
        tokens = min(max_tokens or c.dialogue.max_turn_tokens, c.dialogue.max_turn_tokens)
        seed = secrets.randbits(31) if wanted.seed is None else wanted.seed & 0x7FFFFFFF
        # Recorded log-probs are those of the sampling distribution: only the configured one is what the learner expects.
        usual = (temperature, top_p, tokens) == (default.temperature, default.top_p, c.dialogue.max_turn_tokens)
        return Ask(
            question=question,
            images=images,
            samples=1 if temperature == 0 else samples or c.serve.samples,  # greedy samples would all be the same one
            sampling=SamplingParams(temperature, top_p, tokens, seed),
            operations=operations and bool(c.toolbox.operations),
            max_turns=max_turns or c.dialogue.max_turns_test,
            learn=learn and usual and operations,
        )

    async def _answer(self, ask: Ask) -> Answer:
        async with self.admission.slot():
            return await self.agent.answer(ask)


def _guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The handler with every failure turned into an error reply."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:
            known = _api_error(error)
            return JSONResponse(known.body(), status_code=known.status, headers=known.headers())

    return guarded


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadInput):
        fix = f" ({error.fix})" if error.fix else ""
        return ApiError(400, f"{error.message}{fix}", error.code, "image" if error.code.startswith("image") else None)
    if isinstance(error, Overloaded):
        return ApiError(429, error.message, error.code, retry_after_s=error.retry_after_s)
    if isinstance(error, InfraFailure | RayError) and not isinstance(error, RayTaskError):
        log.warning("request failed: %s", error)
        return ApiError(503, "the service cannot answer at the moment", "unavailable", retry_after_s=2.0)
    log.error("request failed", exc_info=error)
    return ApiError(500, "internal error", "internal_error")


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router in the shape of all other errors."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = {404: "no such route", 405: "this route does not take that method"}.get(status, "the request was refused")
    code = "not_found" if status == 404 else "bad_request"
    known = ApiError(status, f"{detail}: {request.method} {request.url.path[:200]}", code)
    headers = dict(getattr(error, "headers", None) or {})
    return JSONResponse(known.body(), status_code=status, headers={**headers, **known.headers()})


def _sse(chunks: list[dict[str, Any]]) -> StreamingResponse:
    async def events() -> AsyncIterator[str]:
        for chunk in chunks:
            yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


@serve.deployment(name="Gateway")
@serve.ingress()
class Gateway:
    """The Serve deployment: one Agent and its Endpoints in a replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, key_digest: bytes | None, generator_names: Sequence[str], evolution_name: str | None, namespace: str
    ):
        agent = Agent(config, generator_names, evolution_name, namespace)
        self.endpoints = Endpoints(config, agent, key_digest)
        # The first contact with an actor takes seconds (its class is imported here): not at a caller's expense.
        await agent.pool.health(timeout_s=20.0)
        await agent.evolution_stats(timeout_s=20.0)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self.endpoints.app()
