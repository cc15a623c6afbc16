"""Routes of online evolution: status and history, pause, promote, roll back, and the review queue."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from pixelis.serve import schemas
from pixelis.serve.dependencies import Dependencies
from pixelis.serve.responses import Handler
from pixelis.serve.routes.experiences import data_urls, number
from pixelis.serve.schemas import ApiError, EvolutionOrder, EvolutionStatus, ReviewDecision

RECENT = 20
"""Audit events and alerts that a status shows."""
ORDERS = ("pause", "resume", "promote", "rollback")
STATES = ("waiting", "approved", "rejected")
_NOTHING: dict[str, Any] = {}
_NONE: list[Any] = []


class EvolutionRoutes:
    """The handlers; every one needs the key, and orders a service that is not read-only."""

    def __init__(self, dependencies: Dependencies):
        self.dependencies, self.agent, self.access = dependencies, dependencies.agent, dependencies.access

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path, handler."""
        return [
            ("GET", "/v1/evolution", self.status),
            *[("POST", f"/v1/evolution/{order}", self._ordered(order)) for order in ORDERS],
            ("GET", "/v1/review", self.reviews),
            ("GET", "/v1/review/{id}", self.review),
            ("POST", "/v1/review/{id}", self.decide),
        ]

    async def status(self, request: Request) -> Response:
        """``GET /v1/evolution``: complete where the actors answer, and what the gateway itself knows where they do not."""
        self.access.authorise(request)
        look = self.dependencies.look
        (stats, status), (versions, canary), (audit, alerts), memory = await asyncio.gather(
            asyncio.gather(look("stats", _NOTHING), look("status", _NOTHING)),
            asyncio.gather(look("versions", _NONE), look("canary_curve", _NONE)),
            asyncio.gather(look("recent_audit", _NONE, RECENT), look("alerts", _NONE, RECENT)),
            self._memory_stats(),
        )
        reply = EvolutionStatus(
            enabled=self.dependencies.config.evolution.enabled and self.dependencies.evolves,
            read_only=self.dependencies.config.serve.read_only,
            policy_version=status["served"] if status.get("served") is not None else await self._served(),
            updates=int(stats.get("updates", 0)),
            queue=int(stats.get("queue", 0)),
            counts={**_counts(stats), **self.agent.counts, "cache_hits": self.dependencies.cache.hits},
            status=_plain(status),
            memory=memory,
            versions=versions,
            canary=_plain(canary),
            audit=[_plain(item) for item in audit],
            alerts=[_plain(item) for item in alerts],
        )
        return JSONResponse(_plain(reply))

    def _ordered(self, order: str) -> Handler:
        async def handler(request: Request) -> Response:
            wanted = schemas.parse(EvolutionOrder, await self.dependencies.order(request))
            if wanted.version is not None and order in ("pause", "resume"):
                raise ApiError(400, f"`{order}` takes no `version`", "invalid_value", "version")
            if wanted.force and order != "promote":
                raise ApiError(400, f"`{order}` takes no `force`", "invalid_value", "force")
            if wanted.version is None and order == "promote":
                raise ApiError(400, "say which `version` to promote", "missing_parameter", "version")
            by = self.access.operator()
            limit_s = self.dependencies.config.serve.timeout_s  # the canary may have to be asked first
            if order == "promote":
                done = await self.dependencies.tell("promote", wanted.version, by, force=wanted.force, limit_s=limit_s)
            elif order == "rollback":
                done = await self.dependencies.tell("roll_back", wanted.version, by, limit_s=limit_s)
            else:
                done = await self.dependencies.tell(order, by)
            status = await self.dependencies.look("status", _NOTHING)
            return JSONResponse({"object": "evolution.order", "order": order, "result": _plain(done), "status": _plain(status)})

        return handler

    async def reviews(self, request: Request) -> Response:
        """``GET /v1/review?state=waiting&limit``: without pictures."""
        self.access.authorise(request)
        state = request.query_params.get("state", "waiting")
        if state not in STATES:
            raise ApiError(400, f"`state` is one of {', '.join(STATES)}", "invalid_value", "state")
        limit = int(number(request.query_params.get("limit"), "limit", 50, 1, 200))
        found = await self.dependencies.tell("reviews", state, limit)
        return JSONResponse({"object": "list", "data": [_plain(item) for item in found]})

    async def review(self, request: Request) -> Response:
        """``GET /v1/review/{id}``: with pictures as data URLs."""
        self.access.authorise(request)
        name = self.dependencies.named(request)
        found = await self.dependencies.tell("review", name)
        if found is None:
            raise ApiError(404, f"no review {name}", "not_found", "id")
        return JSONResponse({"object": "review", **_plain(found)})

    async def decide(self, request: Request) -> Response:
        """``POST /v1/review/{id}``: once; the second decision is refused."""
        body = await self.dependencies.order(request)
        name = self.dependencies.named(request)
        wanted = schemas.parse(ReviewDecision, body)
        for field in ("answer", "comment", "reviewer"):
            schemas.check_text(getattr(wanted, field), field)
        approve = wanted.decision == "approve"
        if wanted.answer is not None and not approve:
            raise ApiError(400, "a rejected update is not learnt from: leave `answer` out", "invalid_value", "answer")
        by = wanted.reviewer.strip() or self.access.operator()
        done = await self.dependencies.tell("decide", name, approve, by, wanted.comment, wanted.answer)
        return JSONResponse({"object": "review.decision", "id": name, "decision": wanted.decision, "result": _plain(done)})

    async def _served(self) -> int | None:
        if self.agent.version is not None:
            return self.agent.version
        known = [h["version"] for h in await self.agent.router.health() if isinstance(h.get("version"), int)]
        return max(known, default=None)

    async def _memory_stats(self) -> dict[str, Any]:
        if self.agent.memory is None:
            return {}
        try:
            return dict(await self.dependencies.within(self.agent.memory.stats(), 2.0))
        except Exception as error:  # a shard that is away must not hide what the rest knows
            return {"error": type(error).__name__}


def _counts(stats: dict[str, Any]) -> dict[str, int]:
    return {name: value for name, value in stats.items() if isinstance(value, int)}


def _plain(value: Any) -> Any:
    """Records, pictures and containers of them as JSON takes them: pictures become data URLs, what is no number null."""
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(mode="json"))
    if isinstance(value, dict):
        if value and all(isinstance(item, bytes) for item in value.values()):
            return data_urls(value)
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return str(value)
