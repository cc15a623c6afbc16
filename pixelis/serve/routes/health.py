"""Routes that describe the service: models, health, metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import BaseModel

from pixelis.serve.counters import CONTENT_TYPE
from pixelis.serve.dependencies import State, authorise
from pixelis.serve.protocol.openai import ModelCard, ModelList, unknown_model
from pixelis.serve.protocol.question import model_name
from pixelis.serve.state import GatewayState

HEALTH_CACHE_S = 1.0
TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

router = APIRouter(tags=["service"])


class Health(BaseModel):
    """``generators`` is the number of generators that answer."""

    status: str
    generators: int


def _card(state: GatewayState) -> ModelCard:
    return ModelCard(id=model_name(state.config), created=state.created)


@router.get("/v1/models", dependencies=[Depends(authorise)])
async def list_models(state: State) -> ModelList:
    """List the served model."""
    return ModelList(data=[_card(state)])


@router.get("/v1/models/{name:path}", dependencies=[Depends(authorise)])
async def get_model(state: State, name: str) -> ModelCard:
    """Describe the served model; 404 for any other name."""
    card = _card(state)
    if name not in (card.id, state.config.policy.model):
        raise unknown_model(name, card.id)
    return card


@router.get("/healthz", responses={503: {"model": Health}})
async def healthz(state: State, response: Response) -> Health:
    """200 while at least one generator answers, otherwise 503. Needs no key."""
    count = len(await state.generator_health(time.monotonic() - HEALTH_CACHE_S))
    response.status_code = 200 if count else 503
    return Health(status="ok" if count else "no generator answers", generators=count)


@router.get("/metrics", dependencies=[Depends(authorise)], response_class=Response, responses=TEXT)
async def metrics(state: State) -> Response:
    """Prometheus metrics of the replica that answers."""
    return Response(state.counters.text(), media_type=CONTENT_TYPE)
