"""Routes of online evolution: status and history, pause, resume, promote, roll back, and the review queue."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query

from pixelis.protocol.errors import ApiError
from pixelis.serve.agent import data_urls
from pixelis.serve.dependencies import (
    EntityId,
    JsonBody,
    Scoped,
    Sender,
    State,
    authorise,
    require_json,
    require_writable,
)
from pixelis.serve.protocol.evolution import (
    DecisionReply,
    EmptyRequest,
    EvolutionReply,
    EvolutionStatus,
    PromoteRequest,
    ReviewDecision,
    ReviewList,
    ReviewReply,
    RollbackRequest,
)
from pixelis.serve.state import STATUS_TIMEOUT_S, GatewayState

RECENT = 20
CANDIDATES = 200
"""Latest audit events that a status searches for candidates."""
_NO_VALUES: dict[str, Any] = {}
_NO_ITEMS: list[Any] = []

router = APIRouter(tags=["evolution"], dependencies=[Depends(authorise)])
READS = [Depends(Scoped("read", "steer"))]
WRITES = [Depends(Scoped("steer")), Depends(require_writable), Depends(require_json)]


@router.get("/v1/evolution", dependencies=READS)
async def evolution_status(state: State) -> EvolutionStatus:
    """What the service learns and serves, its history, alerts and counters. Late parts are empty."""
    read = state.read_evolution
    (stats, status), (versions, canary), (audit, alerts), memory = await asyncio.gather(
        asyncio.gather(read("stats", _NO_VALUES), read("status", _NO_VALUES)),
        asyncio.gather(read("versions", _NO_ITEMS), read("canary_curve", _NO_ITEMS)),
        asyncio.gather(read("recent_audit", _NO_ITEMS, CANDIDATES), read("alerts", _NO_ITEMS, RECENT)),
        _memory_stats(state),
    )
    served = status.get("served")
    if served is None:
        served = state.agent.version
    if served is None:
        healths = await state.agent.router.health()
        served = max((h["version"] for h in healths if isinstance(h.get("version"), int)), default=None)
    return EvolutionStatus(
        enabled=state.config.evolution.enabled and state.evolves,
        read_only=state.config.serve.read_only,
        policy_version=served,
        updates=int(stats.get("updates", 0)),
        queue=int(stats.get("queue", 0)),
        counts={
            **{name: value for name, value in stats.items() if isinstance(value, int)},
            **state.agent.counts,
            "cache_hits": state.cache.hits,
        },
        status=status,
        memory=memory,
        versions=versions,
        canary=canary,
        learnt=[
            {"version": event["details"]["version"], "time": event["time"], **event["details"]["shares"]}
            for event in audit
            if event["event"] == "candidate" and event["details"].get("shares")
        ],
        audit=audit[:RECENT],
        alerts=alerts,
    )


@router.post("/v1/evolution/pause", dependencies=WRITES)
async def pause(
    state: State, caller: Sender, body: Annotated[EmptyRequest, Depends(JsonBody(EmptyRequest))]
) -> EvolutionReply:
    """Pause learning until `resume`, restarts included."""
    return await _reply(state, "pause", await state.call_evolution("pause", caller.label))


@router.post("/v1/evolution/resume", dependencies=WRITES)
async def resume(
    state: State, caller: Sender, body: Annotated[EmptyRequest, Depends(JsonBody(EmptyRequest))]
) -> EvolutionReply:
    """Resume learning."""
    return await _reply(state, "resume", await state.call_evolution("resume", caller.label))


@router.post("/v1/evolution/promote", dependencies=WRITES)
async def promote(
    state: State, caller: Sender, body: Annotated[PromoteRequest, Depends(JsonBody(PromoteRequest))]
) -> EvolutionReply:
    """Serve a version, if the canary does not refuse it."""
    by, timeout_s = caller.label, state.config.serve.timeout_s  # the canary may have to run first
    result = await state.call_evolution("promote", body.version, by, force=body.force, timeout_s=timeout_s)
    return await _reply(state, "promote", result)


@router.post("/v1/evolution/rollback", dependencies=WRITES)
async def roll_back(
    state: State, caller: Sender, body: Annotated[RollbackRequest, Depends(JsonBody(RollbackRequest))]
) -> EvolutionReply:
    """Serve an earlier promoted version again, and withdraw the later ones."""
    by, timeout_s = caller.label, state.config.serve.timeout_s
    result = await state.call_evolution("roll_back", body.version, by, timeout_s=timeout_s)
    return await _reply(state, "rollback", result)


@router.get("/v1/review", dependencies=[Depends(Scoped("steer"))])
async def list_reviews(
    state: State,
    state_: Annotated[Literal["waiting", "approved", "rejected"], Query(alias="state")] = "waiting",
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> ReviewList:
    """List updates in the review queue, without pictures."""
    return ReviewList(data=await state.call_evolution("reviews", state_, limit))


@router.get("/v1/review/{id}", dependencies=[Depends(Scoped("steer"))])
async def get_review(state: State, id: EntityId) -> ReviewReply:
    """Read an update in the review queue with the pictures its samples saw, as data URLs."""
    review = await state.call_evolution("review", id)
    if review is None:
        raise ApiError(404, f"no review {id}", "not_found", "id")
    return ReviewReply(**{**review, "pictures": data_urls(review["pictures"])})


@router.post("/v1/review/{id}", dependencies=WRITES)
async def decide(
    state: State,
    caller: Sender,
    id: EntityId,
    body: Annotated[ReviewDecision, Depends(JsonBody(ReviewDecision))],
) -> DecisionReply:
    """Approve or reject an update. It can be decided once."""
    decision = (body.decision == "approve", caller.label, body.comment, body.answer, body.reviewer.strip())
    result = await state.call_evolution("decide", id, *decision)
    return DecisionReply(id=id, decision=body.decision, result=result)


async def _reply(
    state: GatewayState, order: Literal["pause", "resume", "promote", "rollback"], result: Any
) -> EvolutionReply:
    return EvolutionReply(order=order, result=result, status=await state.read_evolution("status", _NO_VALUES))


async def _memory_stats(state: GatewayState) -> dict[str, Any]:
    if state.agent.memory is None:
        return {}
    try:
        return dict(await state.with_timeout(state.agent.memory.stats(), STATUS_TIMEOUT_S))
    except Exception as error:  # a shard that does not answer must not hide the rest of the status
        return {"error": type(error).__name__}
