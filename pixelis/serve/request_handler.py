"""Answers the question routes: a cached reply or the agent's, as JSON or a stream, in time."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi.responses import JSONResponse, Response
from ray.exceptions import RayError

from pixelis.errors import DataFailure, InfraFailure
from pixelis.protocol.errors import ApiError
from pixelis.protocol.request import Request
from pixelis.records import Verdict
from pixelis.serve.agent_types import Answer, Pictures, TextEvent
from pixelis.serve.keys import Caller
from pixelis.serve.protocol.question import ReplyFormat
from pixelis.serve.responses import EventStream, api_error, until
from pixelis.serve.state import GatewayState

CACHE_CHECK_S = 1.0


async def signed(
    state: GatewayState, format: Callable[..., ReplyFormat], body: Any, started: float, caller: Caller
) -> ReplyFormat:
    """The reply format of a request of ``caller``. Raises ApiError."""
    user = body.user
    body.user = caller.owner(user)
    await use_files(state, caller, body)
    # In a thread: the check of a schema takes up to .4 s.
    reply_format = await asyncio.to_thread(format, state.config, body, started)
    check_priority(state, caller, reply_format.query.sampling.priority)
    reply_format.query = dataclasses.replace(reply_format.query, voter=caller.voter(user))
    reply_format.caller = caller
    return reply_format


def check_priority(state: GatewayState, caller: Caller, priority: int) -> None:
    """Raises ApiError 403 for one that the caller's key may not ask for."""
    least = state.config.serve.priority
    if priority < least and "steer" not in caller.scopes:
        message = f"{caller.label} lacks the scope steer, which a `priority` below {least} needs"
        raise ApiError(403, message, "missing_scope", "priority")


async def use_files(state: GatewayState, caller: Caller, body: Request) -> None:
    """Give a body the uploads that it names."""
    if ids := set(body.file_ids()):
        body.use_files(await asyncio.to_thread(_file_urls, state, caller, ids))


def _file_urls(state: GatewayState, caller: Caller, ids: set[str]) -> dict[str, str]:
    """The data URLs of the caller's files, which together may be as large as a body."""
    limit = state.config.serve.max_body_bytes
    if sum(state.files.get(caller.name, id).bytes for id in ids) > limit:
        raise ApiError(413, f"the files of the request have more than {limit} bytes", "body_too_large")
    urls = {}
    for id in ids:
        file, content = state.files.read(caller.name, id)
        urls[id] = f"data:{file.media_type};base64,{base64.b64encode(content).decode('ascii')}"
    return urls


def shown_to(caller: Caller, answer: Answer) -> Answer:
    """The answer as its caller may see it: of another key's experiences only the weight of their votes."""
    hidden = {n.experience.id for n in answer.neighbours if not caller.may_see(n.experience.user)}
    return dataclasses.replace(answer, verdict=_hide_votes(answer.verdict, hidden)) if hidden else answer


def verdict_for(caller: Caller, verdict: Verdict) -> Verdict:
    """A stored verdict as ``caller`` may see it."""
    votes = verdict.votes if "read" not in caller.scopes else []
    return _hide_votes(verdict, {vote.id for vote in votes if vote.source == "neighbour"})


def _hide_votes(verdict: Verdict, hidden: set[str]) -> Verdict:
    """The verdict without these votes' ids and answers, and without what would reveal them."""
    if not hidden:
        return verdict
    votes = [
        vote.model_copy(update={"id": "", "answer": None}) if vote.id in hidden else vote
        for vote in verdict.votes
    ]
    return verdict.model_copy(update={"votes": votes, "answer_weights": {}, "strategies": {}})


async def respond(state: GatewayState, reply_format: ReplyFormat, deadline: float) -> Response:
    """The reply to an admitted request. Raises ApiError 504 at ``deadline`` (event loop's time)."""
    try:
        async with asyncio.timeout_at(deadline), contextlib.AsyncExitStack() as stack:
            reply = await _cached_reply(state, reply_format)
            if reply is None:
                reply_format.query, size = await state.agent.measure(reply_format.query)
                await stack.enter_async_context(state.pictures.reserve(size))
            if reply_format.stream and reply is None:
                # Decoded first: once a stream has begun, its status can no longer report bad pictures.
                pictures = await state.agent.decode(reply_format.query)
                events = _stream(state, reply_format, pictures, deadline)
                return EventStream(events, deadline, stack.pop_all())
            if reply is None:
                async with state.admission.slot(reply_format.query.sampling.priority):
                    answer = await state.agent.answer(reply_format.query)
                reply = await _complete(state, reply_format, answer)
    except TimeoutError:
        raise timeout_error(state) from None
    if reply_format.stream:
        return EventStream(_stream_cached(reply_format, reply), deadline)
    return JSONResponse(reply)


async def _stream(
    state: GatewayState, reply_format: ReplyFormat, pictures: Pictures, deadline: float
) -> AsyncGenerator[str, None]:
    """The events of an answer as it develops; a failure is the last one."""
    try:
        yield reply_format.stream_start()
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout_at(deadline):
                await stack.enter_async_context(state.admission.slot(reply_format.query.sampling.priority))
            turns = until(deadline, state.agent.stream(reply_format.query, pictures))
            items = await stack.enter_async_context(contextlib.aclosing(turns))
            answer: Answer | None = None
            async for item in items:
                if isinstance(item, Answer):
                    answer = item
                    break
                if isinstance(item, TextEvent):
                    event = reply_format.stream_text(item)
                else:
                    event = reply_format.stream_turn(item)
                if event:
                    yield event
        assert answer is not None
        async with asyncio.timeout_at(deadline):
            reply = await _complete(state, reply_format, answer)
        last = reply_format.stream_end(reply)
    except TimeoutError:
        last = reply_format.stream_error(timeout_error(state))
    except Exception as error:
        last = reply_format.stream_error(api_error(error))
    yield last


async def _stream_cached(reply_format: ReplyFormat, reply: dict[str, Any]) -> AsyncGenerator[str, None]:
    yield reply_format.stream_start()
    yield reply_format.stream_end(reply)


async def _complete(state: GatewayState, reply_format: ReplyFormat, answer: Answer) -> dict[str, Any]:
    partial = answer.verdict.partial
    state.counters.answered(answer.seconds, bool(answer.retrieval_id) or partial, partial)
    reply = await reply_format.reply(state.agent, shown_to(reply_format.caller, answer))
    # With all shards, after the cold start, or on a disk that stores again, the next reply may differ.
    lasting = not partial and not answer.cold_start and answer.remembered in ("yes", "no")
    if reply_format.cache_key is not None and lasting:
        state.cache.put(reply_format.cache_key, reply, answer.group.policy_version, answer.experience_id)
    return reply


async def _cached_reply(state: GatewayState, reply_format: ReplyFormat) -> dict[str, Any] | None:
    """The cached reply, if all generators serve its version and its experience was not deleted."""
    cached = None if reply_format.cache_key is None else state.cache.get(reply_format.cache_key)
    if cached is None:
        return None
    versions = {h.get("version") for h in await state.generator_health(time.monotonic())}
    if versions != {cached.version}:
        return None
    experience_id, memory = cached.experience_id, state.agent.memory
    if experience_id is not None and memory is not None:
        try:
            if await state.with_timeout(memory.get(experience_id), CACHE_CHECK_S) is None:
                return None
        except (RayError, InfraFailure, DataFailure, ApiError):
            return None
    state.cache.hits += 1
    return reply_format.cached_reply(json.loads(cached.body))


def timeout_error(state: GatewayState) -> ApiError:
    return ApiError(504, f"no answer within {state.config.serve.timeout_s:g} s", "timeout", retry_after_s=1.0)
