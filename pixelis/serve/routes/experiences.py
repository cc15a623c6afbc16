"""Routes of stored experiences: feedback, reading, deletion."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from ray.exceptions import RayError

from pixelis.actors.memory import Memory
from pixelis.errors import DataFailure, InfraFailure
from pixelis.protocol.errors import ApiError, PlainText
from pixelis.records import Experience, Feedback
from pixelis.serve.agent import data_urls
from pixelis.serve.dependencies import (
    Admitted,
    EntityId,
    JsonBody,
    RequestTiming,
    Scoped,
    Sender,
    State,
    authorise,
    limit_rate,
    require_json,
    require_room,
    require_writable,
)
from pixelis.serve.keys import NAME, Caller, Scope
from pixelis.serve.protocol.agent import without_tokens
from pixelis.serve.protocol.experiences import (
    DeletionReply,
    ExperienceList,
    ExperienceReply,
    ExperienceSearch,
    FeedbackReply,
    FeedbackRequest,
    FoundExperience,
    FoundExperiences,
)
from pixelis.serve.protocol.question import search_query
from pixelis.serve.request_handler import verdict_for
from pixelis.serve.state import ACTOR_TIMEOUT_S, GatewayState

log = logging.getLogger(__name__)

PAGE_SIZE = 50
MAX_PAGE_SIZE = 200
LAST_ID = "\U0010ffff"
"""Sorts after every id."""
KeyName = Annotated[str | None, Query(pattern=NAME, description="the name of another key")]
SEARCH_CHECKS = [Depends(require_json), Depends(require_room), Depends(limit_rate)]
FEEDBACK_CHECKS = [
    Depends(Scoped("feedback")),
    Depends(require_writable),
    Depends(require_json),
    Depends(limit_rate),
]

router = APIRouter(tags=["experiences"], dependencies=[Depends(authorise)])


@router.post("/v1/feedback", dependencies=FEEDBACK_CHECKS)
async def add_feedback(
    state: State, caller: Sender, body: Annotated[FeedbackRequest, Depends(JsonBody(FeedbackRequest))]
) -> FeedbackReply:
    """Store feedback with an experience, redacted. It is no label; see `evolution.words` for its `comment`."""
    feedback = Feedback(
        correct=body.correct, answer=body.answer, comment=body.comment, created_at=time.time()
    )
    owner = (await _visible(state, caller, body.experience_id)).user
    names_users = "users" in caller.scopes and caller.owns(owner)
    voter = (owner or "") if names_users else caller.voter(None)
    experience = await state.with_timeout(
        state.agent.after_reply.feedback(body.experience_id, feedback, caller.label, voter)
    )
    return FeedbackReply(experience_id=body.experience_id, count=len(experience.feedback))


@router.get("/v1/experiences")
async def list_experiences(
    state: State,
    caller: Sender,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE,
    before: Annotated[PlainText, Query(description="a time, or `next_before` of the previous page")] = "",
    user: PlainText | None = None,
    key: KeyName = None,
) -> ExperienceList:
    """List experiences, newest first. `key` and all users' experiences need the scope `read`."""
    memory = _memory(state)
    text, _, id = before.partition("/")  # TIME/ID, TIME or empty
    try:
        created_at = float(text or "inf")
    except ValueError:
        created_at = math.nan
    if not created_at >= 0:
        message = "`before` is a time in seconds or a reply's `next_before`"
        raise ApiError(400, message, "invalid_value", "before")
    page_end = created_at, id or LAST_ID
    experiences = await state.with_timeout(memory.list(limit, page_end, _readable(caller, key, user)))
    next_before = (
        f"{experiences[-1].created_at!r}/{experiences[-1].id}" if len(experiences) == limit else None
    )
    return ExperienceList(data=[_shown(e, caller) for e in experiences], next_before=next_before)


@router.post("/v1/experiences/search", dependencies=SEARCH_CHECKS)
async def search_experiences(
    state: State,
    caller: Sender,
    timing: RequestTiming,
    body: Annotated[ExperienceSearch, Depends(JsonBody(ExperienceSearch, pictures=True))],
    admitted: Admitted,
) -> FoundExperiences:
    """Find the experiences most similar to a text, a picture or both, among those that you may list."""
    _memory(state)
    owner = _readable(caller, body.key, body.user)
    query = search_query(state.config, body.text, body.image)
    try:
        async with asyncio.timeout_at(timing.deadline):
            query, size = await state.agent.measure(query)
            async with state.pictures.reserve(size), state.admission.slot(state.config.serve.priority):
                result = await state.agent.search(query, body.k, owner, ACTOR_TIMEOUT_S)
    except TimeoutError:
        message = f"no result within {state.config.serve.timeout_s:g} s"
        raise ApiError(504, message, "timeout", retry_after_s=1.0) from None
    matches = [
        FoundExperience(experience=_shown(n.experience, caller), similarity=n.similarity)
        for n in result.neighbours
    ]
    return FoundExperiences(data=matches, partial=result.partial)


@router.get("/v1/experiences/{id}")
async def get_experience(state: State, caller: Sender, id: EntityId) -> ExperienceReply:
    """Read an experience with its pictures; of another key with the scope `read`."""
    experience = await _visible(state, caller, id)
    pictures = await state.with_timeout(_memory(state).pictures(id))
    return ExperienceReply(experience=_shown(experience, caller), pictures=data_urls(pictures))


@router.delete("/v1/experiences/{id}", dependencies=[Depends(require_writable)])
async def delete_experience(state: State, caller: Sender, id: EntityId) -> DeletionReply:
    """Delete an experience, its waiting updates and cached replies; of another key with `steer`."""
    await state.agent.drain(ACTOR_TIMEOUT_S)  # it may be on its way into the memory
    if "steer" not in caller.scopes and not caller.owns((await _visible(state, caller, id)).user):
        raise ApiError(403, f"{caller.label} lacks the scope steer", "missing_scope")
    if not await remove_experience(state, caller, id):
        raise _unknown(id)
    return DeletionReply(deleted=1, ids=[id])


@router.delete("/v1/experiences", dependencies=[Depends(require_writable)])
async def delete_user(
    state: State, caller: Sender, user: Annotated[PlainText, Query(min_length=1)], key: KeyName = None
) -> DeletionReply:
    """Delete everything stored from a user's requests; `key`, for another key, needs `steer`."""
    # Waiting updates go first: if a call fails in between, the same request still finds the experiences.
    name = _space(caller, key, "steer").owner(user) or ""
    memory, timeout_s, ids = _memory(state), _delete_timeout_s(state), list[str]()
    await state.agent.drain(ACTOR_TIMEOUT_S)
    while page := [e.id for e in await state.with_timeout(memory.list(MAX_PAGE_SIZE, None, name), timeout_s)]:
        await _forget(state, page)
        if not await state.with_timeout(memory.delete(page), timeout_s):
            break  # another request deletes the same
        ids += page
    late = await state.with_timeout(memory.delete_user(name), timeout_s)
    await _forget(state, late)
    ids += late
    await _audit_deletion(state, caller, ids, {"user": name})
    return DeletionReply(deleted=len(ids), ids=ids)


async def remove_experience(state: GatewayState, caller: Caller, id: str) -> bool:
    """Delete an experience, its waiting updates and cached replies; False if unknown."""
    await _forget(state, [id])
    if not await state.with_timeout(_memory(state).delete([id]), _delete_timeout_s(state)):
        return False
    await _audit_deletion(state, caller, [id], {"ids": [id]})
    return True


async def _visible(state: GatewayState, caller: Caller, id: str) -> Experience:
    """An experience that the caller may see. Raises ApiError 404 for others."""
    experience = await stored_experience(state, _memory(state), id)
    if experience is None or not caller.may_see(experience.user):
        raise _unknown(id)
    return experience


async def stored_experience(state: GatewayState, memory: Memory, id: str) -> Experience | None:
    """Raises ApiError 500 for a damaged experience."""
    try:
        return await state.with_timeout(memory.get(id))
    except DataFailure as error:
        message = f"{error.message}: its operator can repair it from an export"
        raise ApiError(500, message, error.code) from None


def _space(caller: Caller, key: str | None, scope: Scope) -> Caller:
    """The caller, or the key of this name, which needs ``scope``."""
    if key is None or key == caller.name:
        return caller
    if scope not in caller.scopes:
        raise ApiError(403, f"{caller.label} lacks the scope {scope}", "missing_scope", "key")
    return Caller(name=key)


def _readable(caller: Caller, key: str | None, user: str | None) -> str | None:
    """Owner, as stored, whose experiences the caller may list and search; None for all."""
    if key is None and user is None and "read" in caller.scopes:
        return None
    return _space(caller, key, "read").owner(user)


async def _forget(state: GatewayState, ids: list[str]) -> None:
    state.cache.forget(set(ids))
    if state.evolves and ids:
        await state.call_evolution("forget", ids, timeout_s=_delete_timeout_s(state))


async def _audit_deletion(
    state: GatewayState, caller: Caller, ids: list[str], details: dict[str, Any]
) -> None:
    if state.evolves:
        event = ("deletion", caller.label, "delete", "success", {**details, "count": len(ids)})
        try:
            await state.call_evolution("audit", *event)
        except (RayError, InfraFailure, ApiError):
            log.exception("a deletion is complete but could not be written to the audit log: %s", details)


def _delete_timeout_s(state: GatewayState) -> float:
    return max(ACTOR_TIMEOUT_S, state.config.serve.timeout_s)  # a shard may restart meanwhile


def _memory(state: GatewayState) -> Memory:
    if state.agent.memory is None:
        raise ApiError(404, "this service stores nothing: it runs without a memory", "no_memory")
    return state.agent.memory


def _shown(experience: Experience, caller: Caller) -> Experience:
    trajectory = without_tokens(experience.trajectory, {})
    media = [medium.model_copy(update={"details": ""}) for medium in experience.question.media]
    question = experience.question.model_copy(update={"media": media})
    verdict = verdict_for(caller, experience.verdict)
    return experience.model_copy(update={"question": question, "trajectory": trajectory, "verdict": verdict})


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"no experience {id} is stored", "not_found", "experience_id")
