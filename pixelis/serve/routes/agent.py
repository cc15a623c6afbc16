"""``POST /v1/agent``: an answer with its verdict and trajectory."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from pixelis.serve.dependencies import Admitted, QuestionBody, RequestTiming, Sender, State
from pixelis.serve.protocol.agent import AgentFormat, AgentReply, AgentRequest
from pixelis.serve.request_handler import respond, signed
from pixelis.serve.routes.chat import CHECKS, STREAM

router = APIRouter(tags=["questions"], dependencies=CHECKS)


@router.post("/v1/agent", response_model=AgentReply, responses={200: {"content": STREAM}})
async def agent(
    state: State,
    caller: Sender,
    timing: RequestTiming,
    body: Annotated[AgentRequest, Depends(QuestionBody(AgentRequest))],
    admitted: Admitted,
) -> Response:
    """Answer a question and show the complete trajectory. With `stream`, send every turn as a server-sent event."""
    reply_format = await signed(state, AgentFormat, body, timing.started, caller)
    return await respond(state, reply_format, timing.deadline)
