"""``POST /v1/chat/completions`` and ``POST /v1/agent``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from pixelis.serve.dependencies import (
    Admitted,
    QuestionBody,
    RequestTiming,
    Scoped,
    Sender,
    State,
    limit_rate,
    require_json,
    require_room,
)
from pixelis.serve.protocol.agent import AgentFormat, AgentReply, AgentRequest
from pixelis.serve.protocol.openai import ChatCompletion, ChatFormat, ChatRequest
from pixelis.serve.request_handler import respond, signed

# A request is refused before its body is read, and counts against its client's rate only if there is room.
CHECKS = [Depends(Scoped("ask")), Depends(require_json), Depends(require_room), Depends(limit_rate)]
STREAM = {"text/event-stream": {"schema": {"type": "string"}}}

router = APIRouter(tags=["questions"], dependencies=CHECKS)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses={200: {"content": STREAM}})
async def chat_completions(
    state: State,
    caller: Sender,
    timing: RequestTiming,
    body: Annotated[ChatRequest, Depends(QuestionBody(ChatRequest))],
    admitted: Admitted,
) -> Response:
    """Answer a question by the vote of several samples. `stream` sends chunks as server-sent events."""
    reply_format = await signed(state, ChatFormat, body, timing.started, caller)
    return await respond(state, reply_format, timing.deadline)


@router.post("/v1/agent", response_model=AgentReply, responses={200: {"content": STREAM}})
async def agent(
    state: State,
    caller: Sender,
    timing: RequestTiming,
    body: Annotated[AgentRequest, Depends(QuestionBody(AgentRequest))],
    admitted: Admitted,
) -> Response:
    """Answer a question and show the complete trajectory. `stream` sends every turn as an event."""
    reply_format = await signed(state, AgentFormat, body, timing.started, caller)
    return await respond(state, reply_format, timing.deadline)
