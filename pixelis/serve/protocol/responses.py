"""OpenAI's responses of a vote: the request, its reply, and the stored response."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, PrivateAttr

from pixelis.config import Config
from pixelis.protocol.chat import Choice, Usage
from pixelis.protocol.completion import Completion
from pixelis.protocol.log_probs import LogProbs
from pixelis.protocol.responses import (
    LOG_PROBS,
    ResponseReply,
    ResponsesBody,
    ResponseStream,
    response_outcome,
    response_usage,
)
from pixelis.records import Experience, Trajectory, new_id
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import Answer, TurnEvent
from pixelis.serve.protocol.conversation import read_messages
from pixelis.serve.protocol.log_probs import answer_log_probs
from pixelis.serve.protocol.openai import PixelisFields
from pixelis.serve.protocol.question import (
    Conversation,
    QuestionRequest,
    ReplyFormat,
    agent_query,
    reply_cache_key,
)

PREFIX = "resp_"
RESPONSE_ID = r"^resp_[0-9a-f]{16}$"


class ResponsesRequest(ResponsesBody, QuestionRequest):
    """Body of ``POST /v1/responses``: a question as text or messages, perhaps after a stored response.

    ``store`` false stores no experience.
    """

    question_param: ClassVar[str] = "input"
    image_param: ClassVar[str] = "input"
    _earlier: Conversation = PrivateAttr(default_factory=lambda: Conversation(""))

    def continue_from(self, earlier: Conversation) -> None:
        self._earlier = earlier

    def conversation(self) -> Conversation:
        return read_messages(self.raw_messages(), "input", self._earlier)


class ResponseDeleted(BaseModel):
    """Reply of ``DELETE /v1/responses/{id}``."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseObject(ResponseReply):
    """Reply of ``POST /v1/responses`` and ``GET /v1/responses/{id}``.

    ``output`` is the winning sample, in a stream the first: a ``reasoning`` item for each thought, an
    ``mcp_call`` item for each pixel operation, and the ``message`` with the elected answer. ``status`` is
    "incomplete" if no sample reached an answer for want of tokens.
    """

    pixelis: PixelisFields | None = None


def response_id(experience_id: str) -> str:
    return PREFIX + experience_id.removeprefix("exp_")


def stored_response(experience: Experience) -> ResponseObject | None:
    """The redacted response of an experience, if ``/v1/responses`` answered it."""
    if experience.response is None:
        return None
    parameters, trajectory, verdict = dict(experience.response), experience.trajectory, experience.verdict
    fields = PixelisFields(
        confidence=verdict.confidence,
        verdict=verdict,
        policy_version=experience.policy_version,
        operations=trajectory.operations_ok,
        experience_id=experience.id,
        remembered="yes",
        seconds=parameters.pop("seconds"),
    )
    outcome = _outcome(trajectory, verdict.answer, None)
    return ResponseObject(id=response_id(experience.id), **{**parameters, **outcome}, pixelis=fields)


def _outcome(trajectory: Trajectory, answer: str | None, log_probs: LogProbs | None) -> dict[str, Any]:
    choice = Choice.of(0, answer, trajectory, ())
    completion = Completion(
        choice.message.content,
        choice.finish_reason,
        refusal=choice.message.refusal,
        log_probs=log_probs,
        turns=trajectory.turns,
        dialect=trajectory.dialect,
    )
    return response_outcome(completion, trajectory.id.removeprefix("traj_"))


class ResponsesFormat(ReplyFormat):
    """The ReplyFormat of ``/v1/responses``. A response has the id of its experience."""

    def __init__(self, config: Config, request: ResponsesRequest, started: float):
        super().__init__(config, request.stream, started, request.model)
        stored = request.store is not False
        self.log_probs = LOG_PROBS in (request.include or ())
        self.query = agent_query(
            config,
            request,
            max_tokens=request.token_limit,
            top_p=request.top_p,
            top_log_probs=request.top_logprobs or 0,
            remember=stored,
            learn=stored,
            answers=request.answer_format,
        )
        self.query = dataclasses.replace(self.query, experience_id=new_id("exp"), response=self._parameters)
        self.cache_key = reply_cache_key(f"/v1/responses {self.log_probs}", self.query, request.seed)
        self.base = ResponseObject(
            id=response_id(self.query.experience_id or ""),
            created_at=int(time.time()),
            status="in_progress",
            model=self.model,
            store=stored,
            temperature=self.query.sampling.temperature,
            top_p=self.query.sampling.top_p,
            **request.shown(),
        )
        self.events = ResponseStream(self.base, config.dialogue.dialect)

    async def reply(self, agent: Agent, answer: Answer) -> dict[str, Any]:
        log_probs = None
        if self.log_probs:
            (log_probs,) = await answer_log_probs(agent, answer, [(answer.verdict.answer, answer.winner)])
        changes = {
            "pixelis": PixelisFields.of(answer, self.seconds),
            **_outcome(answer.winner, answer.verdict.answer, log_probs),
        }
        return self._completed(answer).model_copy(update=changes).model_dump(mode="json")

    def _completed(self, answer: Answer) -> ResponseObject:
        usage = response_usage(Usage.of(answer.group.trajectories))
        completed_at = self.base.created_at + int(answer.seconds)
        return self.base.model_copy(update={"completed_at": completed_at, "usage": usage})

    def _parameters(self, answer: Answer) -> dict[str, Any]:
        """The fields of a stored response that its experience lacks."""
        own = {"id", "status", "output", "pixelis"}
        parameters = self._completed(answer).model_dump(mode="json", exclude=own)
        return {**parameters, "seconds": round(answer.seconds, 4)}

    def cached_reply(self, reply: dict[str, Any]) -> dict[str, Any]:
        """The cached response, which keeps its id, with this request's parameters and times."""
        own = ("instructions", "previous_response_id", "metadata", "max_output_tokens", "created_at")
        fields = {**reply["pixelis"], "cached": True, "seconds": self.seconds}
        own_fields = self.base.model_dump(mode="json", include=set(own))
        self.events.base = self.base = self.base.model_copy(update={"id": reply["id"]})
        return {**reply, **own_fields, "completed_at": int(time.time()), "pixelis": fields}

    def stream_turn(self, event: TurnEvent) -> str:
        return self.events.turn(event.turn, event.attempt) if event.sample == 0 else ""
