"""The HTTP gateway on Ray Serve: OpenAI-shaped routes, keys, caps, a bounded queue and deadlines. It holds no model.

A request passes: host, key, content type, its client's rate, admission (429 before a byte of the body is read), body cap while
reading, schema, picture caps before decoding, a slot, the agent, the reply. Every failure is an OpenAI-shaped error; none shows
internals. What asks is here; what looks back is in ``remembered``, what steers in ``steering``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from pixelis.actors.cluster import freeze_gc
from pixelis.config import Config
from pixelis.errors import InfraFailure
from pixelis.serve.access import Access, Shield, digest
from pixelis.serve.agent import Agent
from pixelis.serve.backends import Backends
from pixelis.serve.cache import ReplyCache
from pixelis.serve.counters import CONTENT_TYPE, Counters
from pixelis.serve.dependencies import Dependencies, read_body
from pixelis.serve.events import Answer, Pictures
from pixelis.serve.limits import Admission, RateLimits, running_limit, waiting_limit
from pixelis.serve.page import add_routes
from pixelis.serve.responses import EventStream, Handler, api_error, guarded, http_error, until
from pixelis.serve.routes.evolution import EvolutionRoutes
from pixelis.serve.routes.experiences import ExperienceRoutes
from pixelis.serve.schemas import ApiError
from pixelis.serve.shapes import AgentShape, Chat, Shape, model_name

__all__ = ["Endpoints", "Gateway", "digest"]

HEALTH_CACHE_S = 1.0


class Endpoints:
    """The routes, on any ASGI server; ``key_digest`` None asks for no key. ``replica`` is its name among the metrics.

    ``ingress``: proxies of the server's own before it, see Access.
    """

    def __init__(self, config: Config, agent: Agent, key_digest: bytes | None, replica: str = "0", ingress: int = 0):
        s = config.serve
        self.config, self.agent = config, agent
        self.model = model_name(config)
        self.created = int(time.time())
        self.admission = Admission(running_limit(config), waiting_limit(config))
        self.access = Access(config, key_digest, ingress)
        self.rates = RateLimits(s.per_minute, s.per_hour)
        self.cache = ReplyCache(s.cache, s.cache_ttl_s)
        self.dependencies = Dependencies(config, agent, self.access, self.cache, self.rates)
        self.counters = Counters(replica, self._levels)
        self.seen: tuple[float, list[dict[str, Any]]] = (float("-inf"), [])
        self.looking = asyncio.Lock()

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(title="Pixelis", docs_url=None, redoc_url=None, openapi_url=None, lifespan=self._lifespan)
        routes: list[tuple[str, str, Handler]] = [
            ("POST", Chat.route, functools.partial(self.asked, shape=Chat)),
            ("POST", AgentShape.route, functools.partial(self.asked, shape=AgentShape)),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.models),
            ("GET", "/healthz", self.health),
            ("GET", "/metrics", self.metrics),
            *ExperienceRoutes(self.dependencies).routes(),
            *EvolutionRoutes(self.dependencies).routes(),
        ]
        for method, path, handler in routes:
            app.add_route(path, guarded(path, handler), methods=[method])
        if self.config.serve.page:
            add_routes(app, self.config, needs_key=self.access.key_digest is not None)
        app.add_exception_handler(HTTPException, http_error)
        app.add_middleware(Shield, access=self.access, counters=self.counters)
        return app

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        telling = asyncio.create_task(self._tell())
        yield
        telling.cancel()
        await self.agent.drain()  # what was answered is still to be remembered and learnt from

    async def _tell(self) -> None:
        """Tell Evolution, which watches over the thresholds, what only a gateway can measure."""
        while self.dependencies.evolves and not self.config.serve.read_only:
            await asyncio.sleep(self.config.evolution.alerts.every_s)
            if health := self.counters.health():
                with contextlib.suppress(RayError, InfraFailure, ApiError):
                    await self.dependencies.tell("told", health, self.counters.replica)

    # -- routes that tell -------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """``GET /v1/models`` and ``/v1/models/{name}``."""
        self.access.authorise(request)
        card = {"id": self.model, "object": "model", "created": self.created, "owned_by": "pixelis"}
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [card]})
        if name not in (self.model, self.config.policy.model):
            raise ApiError(404, f"the model `{name[:100]}` is not served here, `{self.model}` is", "model_not_found", "model")
        return JSONResponse(card)

    async def health(self, request: Request) -> Response:
        """``GET /healthz``: 200 while at least one generator answers, 503 otherwise. Needs no key, tells no more than that."""
        able = len(await self._health(time.monotonic() - HEALTH_CACHE_S))
        status = {"status": "ok" if able else "no generator answers", "generators": able}
        return JSONResponse(status, status_code=200 if able else 503)

    async def metrics(self, request: Request) -> Response:
        """``GET /metrics``: Prometheus text of this replica."""
        self.access.authorise(request)
        return Response(self.counters.text(), media_type=CONTENT_TYPE)

    def _levels(self) -> dict[str, float]:
        version = {} if self.agent.version is None else {"policy_version": float(self.agent.version)}
        return {
            "inside": self.admission.inside,
            "shed": self.admission.shed,
            "rate_limited": self.rates.refused,
            "cache_hits": self.cache.hits,
            "cache_entries": len(self.cache.kept),
            "cache_bytes": self.cache.bytes,
            **version,
            **{f"agent_{name}": float(count) for name, count in self.agent.counts.items()},
        }

    async def _health(self, since: float) -> list[dict[str, Any]]:
        """What the generators say, asked at ``since`` (monotonic seconds) or later.

        Whoever waits takes the answers that another caller's question brings, so however many ask, two questions are out at most.
        """
        async with self.looking:
            at, known = self.seen
            if at < since:
                at = time.monotonic()
                known = await self.agent.router.health()
                self.seen = (at, known)
            return known

    # -- the way of a question --------------------------------------------------------------------------------------

    async def asked(self, request: Request, shape: type[Shape]) -> Response:
        """Key, content type, rate, admission, the body under its cap, then the reply; all within ``serve.timeout_s``."""
        started, limit_s = time.monotonic(), self.config.serve.timeout_s
        deadline = asyncio.get_running_loop().time() + limit_s
        self.access.authorise(request)
        self.access.json_only(request)
        self.dependencies.limited(request)
        body: bytes | None = None
        with contextlib.ExitStack() as held:
            held.enter_context(self.admission.enter())
            try:
                async with asyncio.timeout_at(deadline):
                    body = await read_body(request, self.config.serve.max_body_bytes)
                    wanted = shape(self.config, body, started)
                    kept = await self._kept(wanted)
                    if wanted.stream and kept is None:
                        # Once a stream has begun, its status can no longer say that the pictures are bad.
                        pictures = await self.agent.decode(wanted.ask)
                        return EventStream(self._events(wanted, pictures, deadline), held.pop_all())
                    reply = kept or await self._reply(wanted)
            except TimeoutError:
                if body is None:
                    raise ApiError(408, f"the request's body did not arrive in {limit_s:g} s", "request_timeout") from None
                raise self._late() from None
        if wanted.stream:
            return EventStream(_at_once(wanted, reply), held)
        return JSONResponse(reply)

    async def _reply(self, wanted: Shape) -> dict[str, Any]:
        async with self.admission.slot():
            answer = await self.agent.answer(wanted.ask)
        return await self._finished(wanted, answer)

    async def _events(self, wanted: Shape, pictures: Pictures, deadline: float) -> AsyncGenerator[str, None]:
        """The stream of an answer in the making; a failure, the deadline's too, is its last event."""
        yield wanted.first()
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout_at(deadline):
                    await stack.enter_async_context(self.admission.slot())
                turns = until(deadline, self.agent.stream(wanted.ask, pictures))
                items = await stack.enter_async_context(contextlib.aclosing(turns))
                answer: Answer | None = None
                async for item in items:
                    if isinstance(item, Answer):
                        answer = item
                        break
                    yield wanted.turn(item)
            if answer is None:
                raise InfraFailure("the stream of turns ended without an answer")
            async with asyncio.timeout_at(deadline):
                reply = await self._finished(wanted, answer)
            last = wanted.last(reply)
        except TimeoutError:
            last = [wanted.error(self._late())]
        except Exception as error:
            last = [wanted.error(api_error(error))]
        for text in last:
            yield text

    async def _finished(self, wanted: Shape, answer: Answer) -> dict[str, Any]:
        partial = answer.verdict.partial
        self.counters.answered(answer.seconds, bool(answer.retrieval_id) or partial, partial)
        reply = await wanted.reply(self.agent, answer)
        # With all shards there, or the cold start over, the answer may be another.
        if wanted.key is not None and not partial and not answer.cold_start:
            self.cache.keep(wanted.key, reply, answer.group.policy_version, answer.experience_id)
        return reply

    async def _kept(self, wanted: Shape) -> dict[str, Any] | None:
        """The reply kept for this request, if every generator still serves the version that gave it.

        Neither is it given again once its experience was deleted, here or through another replica.
        """
        kept = None if wanted.key is None else self.cache.find(wanted.key)
        if kept is None:
            return None
        serving = {h.get("version") for h in await self._health(time.monotonic())}
        if serving != {kept.version}:
            return None
        name = kept.experience_id
        if name is not None and self.agent.memory is not None:
            if (storing := self.agent.after_reply.background.get(name)) is not None:
                await asyncio.wait([storing], timeout=1.0)
            try:
                if await self.dependencies.within(self.agent.memory.get(name), 1.0) is None:
                    return None
            except (RayError, InfraFailure, ApiError):
                return None
        self.cache.hits += 1
        return wanted.again(json.loads(kept.body))

    def _late(self) -> ApiError:
        return ApiError(504, f"no answer within {self.config.serve.timeout_s:g} s", "timeout", retry_after_s=1.0)


async def _at_once(wanted: Shape, reply: dict[str, Any]) -> AsyncGenerator[str, None]:
    """The stream of a reply that was kept: no turn happens."""
    yield wanted.first()
    for text in wanted.last(reply):
        yield text


@serve.deployment(name="Gateway")
@serve.ingress()
class Gateway:
    """The Serve deployment: one Agent and its Endpoints in a replica.

    ``backends`` names the actors, or is a deployment whose method ``backends`` does.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, key_digest: bytes | None, backends: Backends | DeploymentHandle
    ):
        if isinstance(backends, DeploymentHandle):
            backends = await backends.backends.remote()
        # Redaction and encoding are threads that hold the interpreter: the event loop must not wait 5 ms for each of them.
        sys.setswitchinterval(5e-4)
        agent = Agent(config, backends)
        replica, ingress = serve.get_replica_context().replica_id.unique_id, int("RAY_SERVE_HAPROXY_BUNDLED" in os.environ)
        self.endpoints = Endpoints(config, agent, key_digest, replica, ingress)
        # The first contact with an actor takes seconds (its class is imported here): not at a caller's expense.
        await agent.ready(timeout_s=20.0)
        with contextlib.suppress(ApiError, RayError, InfraFailure):  # it may come up later than the gateway
            await self.endpoints.dependencies.tell("stats", limit_s=20.0)
        freeze_gc()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self.endpoints.app()
