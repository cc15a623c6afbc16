"""Questions: chat completions, ``/v1/agent``, and OpenAI's responses, which may continue a stored one."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response

from pixelis.operations.image import data_url
from pixelis.protocol.chat import ChatBody
from pixelis.protocol.errors import ApiError
from pixelis.protocol.responses import ResponsesBody
from pixelis.records import Exchange, Experience
from pixelis.serve.dependencies import (
    Admitted,
    EntityId,
    JsonBody,
    RequestTiming,
    Scoped,
    Sender,
    State,
    limit_rate,
    require_json,
    require_room,
    require_writable,
)
from pixelis.serve.keys import Caller
from pixelis.serve.protocol.agent import AgentFormat, AgentReply, AgentRequest
from pixelis.serve.protocol.conversation import Conversation
from pixelis.serve.protocol.openai import (
    PREFIX,
    RESPONSE_ID,
    ChatCompletion,
    ChatFormat,
    ResponseDeleted,
    ResponseObject,
    ResponsesFormat,
    stored_response,
)
from pixelis.serve.request_handler import respond, signed, verdict_for
from pixelis.serve.routes.episodes import with_tools
from pixelis.serve.routes.experiences import remove_experience, stored_experience
from pixelis.serve.state import ACTOR_TIMEOUT_S, GatewayState

# A request is refused before its body is read, and counts against its client's rate only if there is room.
ASKED: dict[str, Any] = {
    "dependencies": [Depends(require_json), Depends(require_room), Depends(limit_rate)],
    "responses": {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
}

router = APIRouter(tags=["questions"], dependencies=[Depends(Scoped("ask"))])


@router.post("/v1/chat/completions", response_model=ChatCompletion, **ASKED)
async def chat_completions(
    state: State,
    caller: Sender,
    timing: RequestTiming,
    body: Annotated[ChatBody, Depends(JsonBody(ChatBody, pictures=True))],
    admitted: Admitted,
) -> Response:
    """Answer a question by the vote of several samples. `stream` sends chunks as server-sent events.

    With `tools` it is one sample's next turn, whose calls the client runs.
    """
    if body.offers_tools:
        return await with_tools(state, caller, timing, body)
    reply_format = await signed(state, ChatFormat, body, timing.started, caller)
    return await respond(state, reply_format, timing.deadline)


@router.post("/v1/agent", response_model=AgentReply, **ASKED)
async def agent(
    state: State,
    caller: Sender,
    timing: RequestTiming,
    body: Annotated[AgentRequest, Depends(JsonBody(AgentRequest, pictures=True))],
    admitted: Admitted,
) -> Response:
    """Answer a question and show the complete trajectory. `stream` sends every turn as an event."""
    reply_format = await signed(state, AgentFormat, body, timing.started, caller)
    return await respond(state, reply_format, timing.deadline)


@router.post("/v1/responses", response_model=ResponseObject, **ASKED)
async def create_response(
    state: State,
    caller: Sender,
    timing: RequestTiming,
    body: Annotated[ResponsesBody, Depends(JsonBody(ResponsesBody, pictures=True))],
    admitted: Admitted,
) -> Response:
    """Answer a question by the vote of several samples. `stream` sends reasoning, operations and answer.

    With `tools` it is one sample's next turn, whose calls the client runs.
    """
    if body.offers_tools:
        return await with_tools(state, caller, timing, body)
    earlier = None
    if body.previous_response_id is not None:
        earlier = await _conversation(state, caller, body.previous_response_id, body.user)
    format = partial(ResponsesFormat, earlier=earlier)
    reply_format = await signed(state, format, body, timing.started, caller)
    return await respond(state, reply_format, timing.deadline)


@router.get("/v1/responses/{id}", response_model=ResponseObject)
async def get_response(state: State, caller: Sender, id: EntityId, stream: bool = False) -> Response:
    """Read a stored response, redacted, with the winning sample's steps and without `logprobs`."""
    if stream:
        raise ApiError(400, "`stream` is not supported: leave it out", "unsupported_parameter", "stream")
    experience = await _own(state, caller, id)
    verdict = verdict_for(caller, experience.verdict)
    response = stored_response(experience.model_copy(update={"verdict": verdict}))
    if response is None:
        raise _unknown(id)
    return JSONResponse(response)


@router.delete("/v1/responses/{id}", dependencies=[Depends(require_writable)])
async def delete_response(state: State, caller: Sender, id: EntityId) -> ResponseDeleted:
    """Delete a response and its experience, its updates that wait, and its cached replies."""
    await state.agent.drain(ACTOR_TIMEOUT_S)  # it may be on its way into the memory
    experience = await _own(state, caller, id)
    if experience.response is None or not await remove_experience(state, caller, experience.id):
        raise _unknown(id)
    return ResponseDeleted(id=id)


async def _own(state: GatewayState, caller: Caller, id: str) -> Experience:
    """The experience of a response to this key. Raises ApiError 404."""
    experience = await _experience(state, id)
    if experience is None or not caller.owns(experience.user):
        raise _unknown(id)
    return experience


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"Response with id '{id}' not found.", "response_not_found", "response_id")


async def _conversation(state: GatewayState, caller: Caller, id: str, user: str | None) -> Conversation:
    """The conversation up to the answer of a response to the same caller and user. Raises ApiError 400."""
    experience = await _experience(state, id)
    # Deleting a user deletes what came from it, so that nobody else may go on with it.
    if experience is None or experience.user != caller.owner(user):
        message = f"the response {id[:80]} is not stored: send the earlier messages in `input`"
        raise ApiError(400, message, "previous_response_not_found", "previous_response_id")

    def refuse(reason: str) -> ApiError:
        message = f"{reason}: send the earlier messages in `input`"
        return ApiError(400, message, "unsupported_conversation", "previous_response_id")

    question, answer = experience.question, experience.verdict.answer
    if any(media.kind == "video" for media in question.media):
        raise refuse("clips are not stored")
    assert state.agent.memory is not None
    pictures = await state.with_timeout(state.agent.memory.pictures(experience.id)) if question.media else {}
    if any(media.id not in pictures for media in question.media):
        raise refuse("the pictures of that response are not stored")
    images = [data_url(pictures[media.id]) for media in question.media]
    conversation = Conversation("", images, history=list(question.history))
    # A stored picture has the size that the policy saw: only its crops show details.
    views = [image for image in experience.trajectory.images if image.parent is not None]
    crops = [image.id for image in views if image.id in pictures]
    room = max(0, state.config.dialogue.max_images // 2 - len(images))
    shown = [data_url(pictures[id]) for id in crops[max(0, len(crops) - room) :]]
    if answer is None:  # the next question is asked together with this one
        conversation.question = question.question
    else:
        own = [*conversation.unnamed, *conversation.attach(shown, ["previous_response_id"] * len(shown))]
        conversation.history.append(Exchange(question=question.question, answer=answer, media=own))
    conversation.stored = len(conversation.history)
    return conversation


async def _experience(state: GatewayState, id: str) -> Experience | None:
    memory = state.agent.memory
    if memory is None or re.match(RESPONSE_ID, id) is None:
        return None
    return await stored_experience(state, memory, "exp_" + id.removeprefix(PREFIX))
