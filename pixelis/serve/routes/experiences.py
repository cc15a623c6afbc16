"""Routes of stored experiences: reading with pictures, feedback, deletion."""

from __future__ import annotations

import base64
import math
import time
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from ray.exceptions import RayError

from pixelis.actors.memory import Memory
from pixelis.errors import InfraFailure
from pixelis.evolution.privacy import pseudonym
from pixelis.records import Experience, Feedback
from pixelis.serve import schemas
from pixelis.serve.dependencies import LOOK_S, Dependencies
from pixelis.serve.responses import Handler, log
from pixelis.serve.schemas import ApiError, ExperienceReply, FeedbackRequest

MAX_LISTED = 200
LAST_ID = "\U0010ffff"
"""Sorts after every id: what comes after it was made earlier."""


class ExperienceRoutes:
    """The handlers; every one needs the key, and those that write a service that is not read-only."""

    def __init__(self, dependencies: Dependencies):
        self.dependencies, self.agent, self.access = dependencies, dependencies.agent, dependencies.access
        self.patience_s = max(LOOK_S, dependencies.config.serve.timeout_s)  # a shard may restart meanwhile

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path, handler."""
        return [
            ("POST", "/v1/feedback", self.feedback),
            ("GET", "/v1/experiences", self.listed),
            ("DELETE", "/v1/experiences", self.delete_user),
            ("GET", "/v1/experiences/{id}", self.one),
            ("DELETE", "/v1/experiences/{id}", self.delete),
        ]

    async def feedback(self, request: Request) -> Response:
        """``POST /v1/feedback``: stored with the experience, redacted. Nothing is trained on it."""
        body = await self.dependencies.order(request)
        self.dependencies.limited(request)
        wanted = schemas.parse(FeedbackRequest, body)
        for name in ("answer", "comment"):
            schemas.check_text(getattr(wanted, name), name)
        if wanted.correct is None and wanted.answer is None and not wanted.comment.strip():
            raise ApiError(400, "feedback says `correct`, an `answer` or a `comment`", "missing_parameter", "correct")
        said = Feedback(correct=wanted.correct, answer=wanted.answer, comment=wanted.comment, created_at=time.time())
        self._memory()
        experience = await self.dependencies.within(self.agent.feedback(wanted.experience_id, said))
        return JSONResponse({"object": "feedback", "experience_id": wanted.experience_id, "count": len(experience.feedback)})

    async def listed(self, request: Request) -> Response:
        """``GET /v1/experiences?limit&before&user``: newest first; ``before`` is a time, or a reply's ``next_before``."""
        self.access.authorise(request)
        query = request.query_params
        limit = number(query.get("limit"), "limit", 50, 1, MAX_LISTED)
        made, _, name = query.get("before", "").partition("/")
        before = number(made or None, "before", math.inf, 0, math.inf, whole=False)
        schemas.check_text(name, "before")
        user = query.get("user")
        schemas.check_text(user, "user")
        found = await self.dependencies.within(
            self._memory().list(int(limit), (before, name or LAST_ID), pseudonym(user) if user else None)
        )
        shown = [without_tokens(e).model_dump(mode="json") for e in found]
        more = f"{found[-1].created_at!r}/{found[-1].id}" if len(found) == limit else None
        return JSONResponse({"object": "list", "data": shown, "next_before": more})

    async def one(self, request: Request) -> Response:
        """``GET /v1/experiences/{id}``: with its pictures as data URLs."""
        self.access.authorise(request)
        name = self.dependencies.named(request)
        memory = self._memory()
        experience = await self.dependencies.within(memory.get(name))
        if experience is None:
            raise _unknown(name)
        pictures = await self.dependencies.within(memory.pictures(name))
        reply = ExperienceReply(experience=without_tokens(experience), pictures=data_urls(pictures))
        return JSONResponse(reply.model_dump(mode="json"))

    async def delete(self, request: Request) -> Response:
        """``DELETE /v1/experiences/{id}``: from the memory, from the updates that wait, from the replies kept."""
        self.access.authorise(request)
        self.access.writing()
        name, memory = self.dependencies.named(request), self._memory()
        await self.agent.drain(LOOK_S)  # it may be on its way into the memory
        await self._forget([name])
        if not await self.dependencies.within(memory.delete([name]), self.patience_s):
            raise _unknown(name)
        return await self._deleted([name], {"ids": [name]})

    async def delete_user(self, request: Request) -> Response:
        """``DELETE /v1/experiences?user=NAME``: all that this user's requests left behind.

        What waits for the learner or a person goes before its experience does: after a failure in between the same request
        still finds what it has to delete.
        """
        self.access.authorise(request)
        self.access.writing()
        user = request.query_params.get("user")
        if not user:
            raise ApiError(400, "say whose experiences to delete: ?user=NAME", "missing_parameter", "user")
        schemas.check_text(user, "user")
        name, memory, ids = pseudonym(user), self._memory(), list[str]()
        await self.agent.drain(LOOK_S)
        while page := [e.id for e in await self.dependencies.within(memory.list(MAX_LISTED, None, name), self.patience_s)]:
            await self._forget(page)
            if not await self.dependencies.within(memory.delete(page), self.patience_s):
                break  # another request deletes the same
            ids += page
        late = await self.dependencies.within(memory.delete_user(name), self.patience_s)
        await self._forget(late)
        return await self._deleted([*ids, *late], {"user": name})

    async def _forget(self, ids: list[str]) -> None:
        self.dependencies.cache.forget(set(ids))
        if self.dependencies.evolves and ids:
            await self.dependencies.tell("forget", ids, limit_s=self.patience_s)

    async def _deleted(self, ids: list[str], what: dict[str, Any]) -> Response:
        if self.dependencies.evolves:
            try:
                details = {**what, "count": len(ids)}
                await self.dependencies.tell("audit", "deletion", self.access.operator(), "delete", "success", details)
            except (RayError, InfraFailure, ApiError):
                log.exception("a deletion is done but not in the audit log: %s", what)
        return JSONResponse({"object": "deleted", "deleted": len(ids), "ids": ids})

    def _memory(self) -> Memory:
        if self.agent.memory is None:
            raise ApiError(404, "this service remembers nothing: it has no memory", "no_memory")
        return self.agent.memory


def without_tokens(experience: Experience) -> Experience:
    """A copy for the caller: token ids and log-probs left out."""
    return experience.model_copy(update={"trajectory": schemas.without_tokens(experience.trajectory, {})})


def data_urls(pictures: dict[str, bytes]) -> dict[str, str]:
    """PNG bytes by name as data URLs."""
    return {name: "data:image/png;base64," + base64.b64encode(png).decode("ascii") for name, png in pictures.items()}


def number(text: str | None, name: str, default: float, least: float, most: float, whole: bool = True) -> float:
    """A number of the query string. Raises ApiError 400 for anything else, NaN included, or one out of range."""
    if text is None:
        return default
    try:
        value = float(int(text)) if whole and text.isascii() and len(text) < 20 else float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most or math.isinf(value):
        span = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
        raise ApiError(400, f"`{name}` is a {'whole ' * whole}number {span}", "invalid_value", name)
    return value


def _unknown(name: str) -> ApiError:
    return ApiError(404, f"no experience {name} is remembered", "not_found", "experience_id")
