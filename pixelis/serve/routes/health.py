"""Routes that describe the service: models, health, metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from openai.types import Model
from pydantic import BaseModel

from pixelis.serve.counters import CONTENT_TYPE
from pixelis.serve.dependencies import Scoped, State, authorise
from pixelis.serve.protocol.question import model_name, require_model
from pixelis.serve.state import GatewayState

HEALTH_CACHE_S = 1.0
TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

router = APIRouter(tags=["service"])


class Health(BaseModel):
    """``status`` is "ok", "degraded" (it answers, but stores nothing) or "no generator answers".

    ``memory`` is "ok", or why it stores nothing: "no space", "read-only", "I/O error", "damaged",
    "unavailable".
    """

    status: str
    generators: int
    memory: str | None = None


class ModelList(BaseModel):
    """The served model in a list."""

    object: Literal["list"] = "list"
    data: list[Model]


def _card(state: GatewayState) -> Model:
    name = model_name(state.config)
    return Model(id=name, object="model", created=state.created, owned_by="pixelis")


@router.get("/v1/models", dependencies=[Depends(authorise)])
async def list_models(state: State) -> ModelList:
    """List the served model."""
    return ModelList(data=[_card(state)])


@router.get("/v1/models/{name:path}", dependencies=[Depends(authorise)])
async def get_model(state: State, name: str) -> Model:
    """Describe the served model; 404 for any other name."""
    require_model(state.config, name)
    return _card(state)


@router.get("/healthz", responses={503: {"model": Health}})
async def healthz(state: State, response: Response) -> Health:
    """200 while at least one generator answers, otherwise 503. Needs no key."""
    generators, (refusal, _) = await asyncio.gather(
        state.generator_health(time.monotonic() - HEALTH_CACHE_S), state.memory_condition()
    )
    response.status_code = 200 if generators else 503
    status = "no generator answers" if not generators else "degraded" if refusal else "ok"
    memory = None if state.agent.memory is None else refusal or "ok"
    return Health(status=status, generators=len(generators), memory=memory)


@router.get(
    "/metrics", dependencies=[Depends(Scoped("read", "steer"))], response_class=Response, responses=TEXT
)
async def metrics(state: State) -> Response:
    """Prometheus metrics of the replica that answers."""
    return Response(state.counters.text(), media_type=CONTENT_TYPE)
