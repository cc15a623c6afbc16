"""The HTTP gateway on Ray Serve. It holds no model.

A question passes these checks: host, key, content type, room, rate of its client, size and validity of the
body, size of pictures before decoding, a slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
from collections.abc import AsyncIterator

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

import pixelis
from pixelis.actors.cluster import freeze_gc
from pixelis.actors.generator_scaler import POLL_S, follow
from pixelis.actors.memory import UNAVAILABLE
from pixelis.config import Config
from pixelis.errors import InfraFailure
from pixelis.protocol.errors import ApiError, ErrorResponse
from pixelis.serve.access import Shield, is_loopback
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import Backends
from pixelis.serve.dependencies import openapi
from pixelis.serve.limits import admission_limits
from pixelis.serve.ray_internals import bind_calls_to_loopback
from pixelis.serve.responses import add_exception_handlers
from pixelis.serve.routes import episodes, evolution, experiences, files, health, questions
from pixelis.serve.routes.page import add_page
from pixelis.serve.state import ACTOR_TIMEOUT_S, GatewayState
from pixelis.telemetry import logs

log = logging.getLogger(__name__)

START_TIMEOUT_S = 20.0
PUBLISH_S = 5.0
SWEEP_S = 3600.0
"""Seconds between searches for expired uploads."""
SYSTEM = "System"
"""Name of the deployment whose method ``backends`` names the actors."""


def create_app(state: GatewayState) -> FastAPI:
    page = state.config.serve.page
    app = FastAPI(
        title="Pixelis",
        version=pixelis.__version__,
        summary="Answers questions about pictures with pixel operations",
        docs_url=None,  # add_page serves it with Swagger UI's own files
        redoc_url=None,
        openapi_url="/openapi.json" if page else None,
        redirect_slashes=False,
        responses={"default": {"model": ErrorResponse, "description": "An error in OpenAI's format"}},
        lifespan=_lifespan,
    )
    app.state.gateway = state
    app.openapi = functools.cache(functools.partial(openapi, app))  # type: ignore[method-assign]
    for routes in (questions, episodes, files, experiences, evolution, health):
        app.include_router(routes.router)
    if page:
        add_page(app, state.config, needs_key=state.access.keys.required)
    add_exception_handlers(app)
    app.add_middleware(Shield, access=state.access, counters=state.counters)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: GatewayState = app.state.gateway
    tasks = [
        asyncio.create_task(work(state)) for work in (_report_health, _publish, _follow_size, _sweep_files)
    ]
    yield
    for task in tasks:
        task.cancel()
    await state.agent.drain()  # store experiences and updates of the answers so far


async def _publish(state: GatewayState) -> None:
    while True:
        state.counters.publish()
        await asyncio.to_thread(state.agent.return_memory)
        await asyncio.sleep(PUBLISH_S)


async def _sweep_files(state: GatewayState) -> None:
    while True:
        try:
            await asyncio.to_thread(state.files.sweep)
        except OSError as error:
            log.warning("expired files cannot be removed: %s", error)
        await asyncio.sleep(SWEEP_S)


async def _follow_size(state: GatewayState) -> None:
    """Use the generators that the scaler lists, and admit this replica's share of what they can decode."""
    config, backends, generators = state.config, state.agent.backends, None
    scales = config.serve.max_replicas is not None
    while backends.scaler is not None or scales:
        # The scaler or Serve's controller may be restarting.
        with contextlib.suppress(RayError, RayServeException, InfraFailure, TimeoutError):
            async with asyncio.timeout(ACTOR_TIMEOUT_S):
                if backends.scaler is not None:
                    generators = len(await follow(state.agent.router, backends.scaler, backends.namespace))
                replicas = await asyncio.to_thread(live_replicas) if scales else None
            state.admission.resize(*admission_limits(config, generators, replicas))
        await asyncio.sleep(POLL_S)


def live_replicas() -> int:
    """How many replicas the deployment of this process's own replica has; at least itself. RayError, RayServeException."""
    context = serve.get_replica_context()
    application = serve.status().applications.get(context.app_name)
    deployment = application.deployments.get(context.deployment) if application is not None else None
    return max(1, deployment.replica_states.get("RUNNING", 0)) if deployment is not None else 1


async def _report_health(state: GatewayState) -> None:
    """Send Evolution the metrics that only a gateway can measure."""
    while state.evolves and not state.config.serve.read_only:
        await asyncio.sleep(state.config.evolution.alerts.every_s)
        refusal, damaged = await state.memory_condition()
        # A shard that is late is no disk that refuses; the searches without it have a rate of their own.
        refuses = float(refusal not in ("", UNAVAILABLE))
        metrics = {**state.counters.health(), "memory_refuses": refuses, "memory_damaged": float(damaged)}
        metrics["gated_votes"] = float(state.agent.after_reply.gated_in_a_row)
        with contextlib.suppress(RayError, InfraFailure, ApiError):
            await state.call_evolution("report_metrics", metrics, state.counters.replica)


@serve.deployment(name="Gateway")
@serve.ingress()
class Gateway:
    """The Serve deployment: one agent and its routes in a replica.

    ``backends`` names the actors, or is a deployment with a method ``backends`` that does, or its
    application.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, key_digest: bytes | None, backends: Backends | DeploymentHandle | str
    ):
        if isinstance(backends, str):
            backends = serve.get_deployment_handle(SYSTEM, app_name=backends)
        if isinstance(backends, DeploymentHandle):
            backends = await backends.backends.remote()
        if is_loopback(config.serve.host):
            bind_calls_to_loopback()
        # Threads that redact and encode hold the interpreter, for which the event loop must not wait 5 ms.
        sys.setswitchinterval(5e-4)
        logs.start(config, "gateway")
        name = serve.get_replica_context().replica_id.unique_id
        self.state = GatewayState(config, Agent(config, backends), key_digest, name)
        # The first call to an actor takes seconds, because its class is imported.
        await self.state.agent.ready(START_TIMEOUT_S)
        with contextlib.suppress(ApiError, RayError, InfraFailure):  # it may start later than the gateway
            await self.state.call_evolution("stats", timeout_s=START_TIMEOUT_S)
        freeze_gc()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self.state)
