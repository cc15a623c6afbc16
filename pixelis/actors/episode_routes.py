"""The HTTP routes of episodes: OpenAI's two routes under an episode's address, its reward and its state."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pixelis.actors.rollout_messages import TextUpdate, TurnUpdate
from pixelis.protocol.chat import ChatBody, ChatStream, chat_reply
from pixelis.protocol.completion import Completion
from pixelis.protocol.episodes import (
    EpisodeReply,
    EpisodeRequest,
    EpisodeStatus,
    FailRequest,
    NextEpisodeReply,
    NextEpisodeRequest,
    RewardReply,
    RewardRequest,
)
from pixelis.protocol.errors import ApiError, Model
from pixelis.protocol.messages import Message
from pixelis.protocol.responses import ResponseReply, ResponsesBody, ResponseStream, response_reply
from pixelis.protocol.stream import sse_event
from pixelis.protocol.tools import Toolset
from pixelis.records import new_id

Piece = TextUpdate | TurnUpdate | Completion
ReadBody = Callable[[Request, type[Model]], Awaitable[Model]]


class EpisodeHost(ABC):
    """The episodes of one caller; ``model`` names the policy, ``dialect`` its form of calls.

    All methods raise ApiError.
    """

    model: str
    dialect: str
    operations: frozenset[str]

    @abstractmethod
    async def open(self, body: EpisodeRequest) -> EpisodeStatus: ...

    @abstractmethod
    async def next(self, wait_s: float) -> NextEpisodeReply | None:
        """The next question of a training run, None if there is none in ``wait_s``."""

    @abstractmethod
    def complete(
        self, id: str, messages: Sequence[Message], tools: Toolset, max_tokens: int | None, stream: bool
    ) -> AsyncGenerator[Piece, None]: ...

    @abstractmethod
    async def reward(self, id: str, body: RewardRequest) -> RewardReply: ...

    @abstractmethod
    async def fail(self, id: str, cause: str) -> EpisodeStatus: ...

    @abstractmethod
    async def status(self, id: str) -> EpisodeStatus: ...


def episode_router(
    host_of: Callable[[Request], Awaitable[EpisodeHost]],
    read: ReadBody,
    failure: Callable[[BaseException], ApiError],
) -> APIRouter:
    """The routes over the episodes of a request's caller.

    ``read`` reads a body under its caps; ``failure`` is the error that a caller may see.
    """
    router = APIRouter(prefix="/v1/episodes", tags=["episodes"])

    @router.post("", response_model=EpisodeReply)
    async def open_episode(request: Request) -> Any:
        """Open an episode; an OpenAI client then uses its `base_url`."""
        host = await host_of(request)
        return _placed(request, await host.open(await read(request, EpisodeRequest)))

    @router.post("/next", response_model=NextEpisodeReply, responses={204: {"description": "no question"}})
    async def next_episode(request: Request) -> Any:
        """Wait for a question of a training run, which opens an episode."""
        host = await host_of(request)
        body = await read(request, NextEpisodeRequest)
        offered = await host.next(body.wait_s)
        return Response(status_code=204) if offered is None else _placed(request, offered)

    @router.post("/{id}/v1/chat/completions")
    async def chat(request: Request, id: str) -> Response:
        """Go on with an episode as OpenAI's chat completions do."""
        host = await host_of(request)
        body = await read(request, ChatBody)
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        stream = ChatStream(host.model, host.dialect, include_usage)
        return await _complete(host, id, body, lambda completion: chat_reply(completion, host.model), stream)

    @router.post("/{id}/v1/responses")
    async def responses(request: Request, id: str) -> Response:
        """Go on with an episode as OpenAI's responses do."""
        host = await host_of(request)
        body = await read(request, ResponsesBody)
        base = ResponseReply(
            id=new_id("resp"),
            created_at=int(time.time()),
            status="in_progress",
            model=host.model,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            **body.shown(),
        )
        functions = {tool.name or "" for tool in body.tools or ()}
        stream = ResponseStream(base, host.dialect, functions)
        return await _complete(host, id, body, lambda completion: response_reply(completion, base), stream)

    @router.post("/{id}/reward")
    async def reward(request: Request, id: str) -> RewardReply:
        """End an episode with a reward. A repeated request gets the first one's reply."""
        host = await host_of(request)
        return await host.reward(id, await read(request, RewardRequest))

    @router.post("/{id}/fail")
    async def fail(request: Request, id: str) -> EpisodeStatus:
        """End an episode whose agent failed: it is counted, and nothing is learnt."""
        host = await host_of(request)
        return _placed(request, await host.fail(id, (await read(request, FailRequest)).cause))

    @router.get("/{id}")
    async def status(request: Request, id: str) -> EpisodeStatus:
        """The state of an episode and its branches."""
        return _placed(request, await (await host_of(request)).status(id))

    async def _complete(
        host: EpisodeHost,
        id: str,
        body: ChatBody | ResponsesBody,
        format: Callable[[Completion], dict[str, Any]],
        stream: ChatStream | ResponseStream,
    ) -> Response:
        messages = body.normal_messages()
        pieces = host.complete(
            id, messages, body.toolset(host.operations), body.token_limit, bool(body.stream)
        )
        if isinstance(body, ResponsesBody) and body.previous_response_id is not None:
            message = "an episode keeps its own record: send the whole conversation in `input`"
            raise ApiError(400, message, "unsupported_parameter", "previous_response_id")
        if body.stream:
            return StreamingResponse(
                _events(pieces, format, stream), media_type="text/event-stream", headers=NO_STORE
            )
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, Completion):
                    return JSONResponse(format(piece))
        raise AssertionError("the last piece is the completion")

    async def _events(
        pieces: AsyncGenerator[Piece, None],
        format: Callable[[Completion], dict[str, Any]],
        stream: ChatStream | ResponseStream,
    ) -> AsyncGenerator[str, None]:
        """The events of a reply; a failure is the last one."""
        yield stream.start()
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    if isinstance(piece, Completion):
                        for event in stream.end(format(piece)):
                            yield event
                    elif isinstance(piece, TextUpdate):
                        yield stream.text(piece.text, piece.attempt)
                    else:
                        yield stream.turn(piece.turn, piece.attempt)
        except Exception as error:
            told = failure(error)
            yield stream.error(told) if isinstance(stream, ResponseStream) else sse_event(told.body())

    return router


Reply = TypeVar("Reply", bound=EpisodeReply)
NO_STORE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def _placed(request: Request, reply: Reply) -> Reply:
    """The reply with the address under which the caller reaches the episode."""
    base_url = f"{str(request.base_url).rstrip('/')}/v1/episodes/{reply.id}/v1"
    return reply.model_copy(update={"base_url": base_url})
