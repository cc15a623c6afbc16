"""Routes of episodes: an agent that owns its loop asks the policy for turn after turn, then gives a reward."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import ray
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from ray.actor import ActorHandle

from pixelis.actors.cluster import actor_handle
from pixelis.actors.episode_routes import EpisodeHost, Piece, episode_router, respond
from pixelis.dialogue.session import SamplingParams
from pixelis.protocol.chat import ChatBody
from pixelis.protocol.completion import Completion
from pixelis.protocol.errors import ApiError, Model
from pixelis.protocol.messages import Message
from pixelis.protocol.request import CompletionBody
from pixelis.protocol.request import Request as OpenRequest
from pixelis.protocol.responses import ResponsesBody
from pixelis.serve.agent_types import AgentQuery
from pixelis.serve.dependencies import (
    JsonBody,
    RequestTiming,
    Scoped,
    Sender,
    State,
    Timing,
    authorise,
    limit_rate,
    require_json,
    require_room,
)
from pixelis.serve.keys import Caller
from pixelis.serve.protocol.conversation import Conversation
from pixelis.serve.protocol.question import (
    check_characters,
    is_usual,
    model_name,
    require_model,
    sampling_params,
)
from pixelis.serve.request_handler import check_priority, timeout_error, use_files
from pixelis.serve.responses import EventStream, api_error, until
from pixelis.serve.state import GatewayState


class ServiceHost(EpisodeHost):
    """The episodes of a caller's key, in the actor that all gateways share.

    The episode "" is one that ends with its reply. ``admitted``: the request counts as inside already.
    """

    def __init__(self, state: GatewayState, caller: Caller, deadline: float, admitted: bool = False):
        super().__init__(state.config, model_name(state.config))
        self.state, self.caller, self.deadline, self.admitted = state, caller, deadline, admitted
        self.resources = AsyncExitStack()

    async def call(self, method: str, *arguments: Any) -> Any:
        if method == "open":
            arguments = *arguments, sampling_params(self.config, OpenRequest())
        call = getattr(await self._actor(), method).remote(self.caller.space, *arguments)
        return await self.state.with_timeout(call, self.config.serve.timeout_s)

    async def complete(self, id: str, body: CompletionBody) -> AsyncGenerator[Piece, None]:
        # The address of an episode names the policy, whatever its client calls it
        if not id:
            require_model(self.config, body.model)
        try:
            async with asyncio.timeout_at(self.deadline), AsyncExitStack() as stack:
                if not self.admitted:
                    stack.enter_context(self.state.admission.enter())
                await use_files(self.state, self.caller, body)
                sampling = self._sampling(body, teaches=bool(id))
                # In a thread: reading a body and its schemas takes a while
                messages = await asyncio.to_thread(body.normal_messages)
                tools = await asyncio.to_thread(body.toolset, self.operations)
                size = await self._measure(messages)
                await stack.enter_async_context(self.state.pictures.reserve(size))
                self.resources = stack.pop_all()
        except TimeoutError:
            raise timeout_error(self.state) from None
        request = messages, tools, sampling, body.seed is not None, bool(body.stream)
        return self._pieces(id, request, sampling.priority)

    def stream(self, events: AsyncGenerator[str, None]) -> Response:
        return EventStream(events, self.deadline, self.resources)

    def _sampling(self, body: CompletionBody, teaches: bool) -> SamplingParams:
        config = self.config
        sampling = sampling_params(config, body)
        check_priority(self.state, self.caller, sampling.priority)
        learns = self.state.evolves and not config.serve.read_only
        if teaches and learns and not is_usual(config, sampling):
            param = "temperature" if sampling.temperature != config.serve.sampling.temperature else "top_p"
            message = f"`{param}`: an episode that teaches has the sampling of the service: leave it out"
            raise ApiError(400, message, "unsupported_parameter", param)
        return sampling

    async def _measure(self, messages: Sequence[Message]) -> int:
        """The decoded size of all media. Raises ApiError and BadImage for what is outside the caps."""
        seen = Conversation("")
        for message in messages:
            check_characters(message.text, message.place, "message")
            seen.attach(message.media, message.places)
        query = AgentQuery("", seen.images, 1, SamplingParams(), clips=seen.clips, places=seen.places)
        _, size = await self.state.agent.measure(query)
        return size

    async def _pieces(self, id: str, request: tuple[Any, ...], priority: int) -> AsyncGenerator[Piece, None]:
        try:
            async with self.resources, AsyncExitStack() as stack:
                async with asyncio.timeout_at(self.deadline):
                    await stack.enter_async_context(self.state.admission.slot(priority))
                    actor = await self._actor()
                call = actor.complete.remote(self.caller.space, id, *request)
                try:
                    async for ref in until(self.deadline, call):
                        piece = await ref
                        yield piece
                        if isinstance(piece, Completion):
                            call = None
                            return
                finally:
                    if call is not None:
                        ray.cancel(call)
        except TimeoutError:
            raise timeout_error(self.state) from None

    async def _actor(self) -> ActorHandle:
        backends = self.state.agent.backends
        if backends.episodes is None:
            raise ApiError(404, "this service has no episodes", "no_episodes")
        return await asyncio.to_thread(actor_handle, backends.episodes, backends.namespace)


async def with_tools(
    state: GatewayState, caller: Caller, timing: Timing, body: ChatBody | ResponsesBody
) -> Response:
    """The reply to an admitted question with tools, in an episode of its own that teaches nothing."""
    return await respond(ServiceHost(state, caller, timing.deadline, admitted=True), "", body, api_error)


async def _host(request: Request, state: State, caller: Sender, timing: RequestTiming) -> EpisodeHost:
    await Scoped("feedback" if request.url.path.endswith(("/reward", "/fail")) else "ask")(caller)
    return ServiceHost(state, caller, timing.deadline)


class EpisodeBody(JsonBody[Model]):
    """A body of an episode's routes: those of a completion may have pictures."""

    def __init__(self, model: type[Model]):
        super().__init__(model, pictures=issubclass(model, CompletionBody))

    async def __call__(self, state: State, request: Request, timing: RequestTiming) -> Model:
        await require_json(request)
        if self.pictures:
            await require_room(state)
        return await super().__call__(state, request, timing)


router = APIRouter(dependencies=[Depends(authorise), Depends(limit_rate)])
router.include_router(episode_router(_host, EpisodeBody, api_error))
