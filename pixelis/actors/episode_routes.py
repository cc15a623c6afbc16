"""The HTTP routes of episodes: OpenAI's two routes under an episode's address, its reward and its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from pixelis.actors.rollout_messages import TextUpdate, TurnUpdate
from pixelis.config import Config
from pixelis.protocol.chat import ChatBody, ChatWriter
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
from pixelis.protocol.errors import ApiError
from pixelis.protocol.request import CompletionBody
from pixelis.protocol.responses import ResponseReply, ResponsesBody, ResponseWriter

BODIES = (EpisodeRequest, NextEpisodeRequest, ChatBody, ResponsesBody, RewardRequest, FailRequest)
Piece = TextUpdate | TurnUpdate | Completion


class EpisodeHost(ABC):
    """The episodes of one caller; ``model`` names the policy. Methods raise ApiError."""

    def __init__(self, config: Config, model: str):
        self.config, self.model, self.dialect = config, model, config.dialogue.dialect
        self.operations = frozenset(config.toolbox.operations)

    @abstractmethod
    async def call(self, method: str, *arguments: Any) -> Any:
        """Call `open`, `next`, `reward`, `fail` or `status` of the `Episodes` for this caller."""

    @abstractmethod
    async def complete(self, id: str, body: CompletionBody) -> AsyncGenerator[Piece, None]:
        """Check a request; the pieces of its reply follow, the completion last."""

    def stream(self, events: AsyncGenerator[str, None]) -> Response:
        """The response that sends these events."""
        return StreamingResponse(events, media_type="text/event-stream", headers=NO_STORE)


def episode_router(
    host_of: Callable[..., Any],
    body_of: Callable[[type[BaseModel]], Callable[..., Any]],
    failure: Callable[[BaseException], ApiError],
) -> APIRouter:
    """The routes over the episodes of a request's caller.

    FastAPI dependencies: ``host_of`` gives the caller's EpisodeHost, ``body_of`` one that reads a body under
    its caps. ``failure`` is the error that a caller may see.
    """
    router = APIRouter(prefix="/v1/episodes", tags=["episodes"])
    caller = Depends(host_of)
    opened, awaited, asked, continued, rewarded, failed = (Depends(body_of(model)) for model in BODIES)

    @router.post("", response_model=EpisodeReply)
    async def open_episode(
        request: Request, host: EpisodeHost = caller, body: EpisodeRequest = opened
    ) -> Any:
        """Open an episode; an OpenAI client then uses its `base_url`."""
        return _placed(request, await host.call("open", body))

    @router.post("/next", response_model=NextEpisodeReply, responses={204: {"description": "no question"}})
    async def next_episode(
        request: Request,
        host: EpisodeHost = caller,
        body: NextEpisodeRequest = awaited,
    ) -> Any:
        """Wait for a question of a training run, which opens an episode."""
        offered = await host.call("next", body.wait_s)
        return Response(status_code=204) if offered is None else _placed(request, offered)

    @router.post("/{id}/v1/chat/completions", response_model=ChatCompletion)
    async def chat(id: str, host: EpisodeHost = caller, body: ChatBody = asked) -> Response:
        """Go on with an episode as OpenAI's chat completions do."""
        return await respond(host, id, body, failure)

    @router.post("/{id}/v1/responses", response_model=ResponseReply)
    async def responses(id: str, host: EpisodeHost = caller, body: ResponsesBody = continued) -> Response:
        """Go on with an episode as OpenAI's responses do."""
        return await respond(host, id, body, failure)

    @router.post("/{id}/reward")
    async def reward(id: str, host: EpisodeHost = caller, body: RewardRequest = rewarded) -> RewardReply:
        """End an episode with a reward. A repeated request gets the first one's reply."""
        return await host.call("reward", id, body)

    @router.post("/{id}/fail")
    async def fail(
        request: Request,
        id: str,
        host: EpisodeHost = caller,
        body: FailRequest = failed,
    ) -> EpisodeStatus:
        """End an episode whose agent failed: it is counted, and nothing is learnt."""
        return _placed(request, await host.call("fail", id, body.cause))

    @router.get("/{id}")
    async def status(request: Request, id: str, host: EpisodeHost = caller) -> EpisodeStatus:
        """The state of an episode and its branches."""
        return _placed(request, await host.call("status", id))

    return router


async def respond(
    host: EpisodeHost, id: str, body: ChatBody | ResponsesBody, failure: Callable[[BaseException], ApiError]
) -> Response:
    """The reply to a request, in the format of its ``body``. Raises ApiError."""
    writer = body.writer(host.model, host.dialect)
    pieces = await host.complete(id, body)
    if body.stream:
        return host.stream(_events(pieces, writer, failure))
    async with aclosing(pieces):
        async for piece in pieces:
            if isinstance(piece, Completion):
                return JSONResponse(writer.reply([piece], piece.fields))
    raise AssertionError("the last piece is the completion")


async def _events(
    pieces: AsyncGenerator[Piece, None],
    writer: ChatWriter | ResponseWriter,
    failure: Callable[[BaseException], ApiError],
) -> AsyncGenerator[str, None]:
    """The events of a reply; a failure is the last one."""
    yield writer.start()
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, Completion):
                    yield writer.end(writer.reply([piece], piece.fields))
                elif isinstance(piece, TextUpdate):
                    yield writer.text(piece.text, piece.attempt)
                else:
                    yield writer.turn(piece.turn, piece.attempt)
    except Exception as error:
        yield writer.error(failure(error))


Reply = TypeVar("Reply", bound=EpisodeReply)
NO_STORE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def _placed(request: Request, reply: Reply) -> Reply:
    """The reply with the address under which the caller reaches the episode."""
    base_url = f"{str(request.base_url).rstrip('/')}/v1/episodes/{reply.id}/v1"
    return reply.model_copy(update={"base_url": base_url})
