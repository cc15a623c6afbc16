"""OpenAI's responses: the body of ``POST /v1/responses``, and its reply."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from pixelis.config import Config
from pixelis.dialogue.session import MAX_TOP_LOG_PROBS
from pixelis.protocol.answer_format import AnswerFormat, answer_format
from pixelis.protocol.errors import (
    MAX_COMMENT_CHARS,
    MAX_NAME_CHARS,
    ApiError,
    PlainText,
    StrictModel,
    text_or,
)
from pixelis.protocol.fields import refuse_unsupported
from pixelis.protocol.log_probs import LogProbs
from pixelis.protocol.parts import Content, LenientModel, ReadMessage, file_ids, read_message
from pixelis.protocol.response_events import ResponseEvents
from pixelis.protocol.stream import ThoughtStream
from pixelis.records import Experience, Trajectory, new_id
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import Answer, TextEvent, TurnEvent
from pixelis.serve.protocol.conversation import read_messages
from pixelis.serve.protocol.log_probs import answer_log_probs
from pixelis.serve.protocol.openai import Choice, PixelisFields, Usage
from pixelis.serve.protocol.question import (
    MAX_EXCHANGES,
    Conversation,
    QuestionRequest,
    ReplyFormat,
    agent_query,
    reply_cache_key,
)

MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""Largest ``metadata``, as OpenAI has it."""
PREFIX = "resp_"
RESPONSE_ID = r"^resp_[0-9a-f]{16}$"
MAX_ITEMS = 16 * MAX_EXCHANGES
"""Longest list of input items, those of earlier outputs included."""
LOG_PROBS = "message.output_text.logprobs"
INCLUDED = (LOG_PROBS, "reasoning.encrypted_content", "message.input_image.image_url")
"""Values of ``include``. The last two have no effect: nothing is encrypted, the caller has its input."""


class InputItem(LenientModel):
    """A message, or an item of an earlier output, of which only the answer is context."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None


class TextFormat(StrictModel):
    """How the answer is written. The fields beside ``type`` belong to ``json_schema``."""

    type: str = "text"
    name: PlainText | None = Field(None, max_length=MAX_KEY_CHARS)
    description: PlainText | None = Field(None, max_length=MAX_COMMENT_CHARS)
    schema_: Any = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictModel):
    """The format of the answer."""

    format: TextFormat | None = None
    verbosity: str | None = None

    def shown(self) -> dict[str, Any]:
        f = self.format or TextFormat()
        fields = None if f.type == "json_schema" else {"type"}
        rest = {"verbosity": self.verbosity} if self.verbosity is not None else {}
        return {"format": f.model_dump(by_alias=True, exclude_none=True, include=fields), **rest}


def _few_pairs(metadata: Any) -> Any:
    """Checked before the pairs, because pydantic makes an error of each that is wrong."""
    if isinstance(metadata, dict) and len(metadata) > MAX_PAIRS:
        raise PydanticCustomError("too_long", "has more than {most} pairs", {"most": MAX_PAIRS})
    return metadata


Metadata = Annotated[
    dict[
        Annotated[PlainText, Field(max_length=MAX_KEY_CHARS)],
        Annotated[PlainText, Field(max_length=MAX_VALUE_CHARS)],
    ],
    BeforeValidator(_few_pairs),
]


class ResponsesRequest(QuestionRequest):
    """Body of ``POST /v1/responses``: a question as text or messages, perhaps after a stored response.

    ``store`` false stores no experience. Unknown fields and those that would change the reply but are not
    supported (``tools``, ``background``, ...) are errors.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    question_param: ClassVar[str] = "input"
    image_param: ClassVar[str] = "input"
    model: str
    input: text_or(Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)])  # type: ignore[valid-type]
    instructions: str | None = None
    previous_response_id: PlainText | None = Field(None, max_length=MAX_NAME_CHARS)
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    max_output_tokens: int | None = Field(None, ge=1)
    metadata: Metadata | None = None
    include: list[str] | None = Field(None, max_length=16, fail_fast=True)
    text: TextOptions | None = None
    reasoning: dict[str, Any] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOG_PROBS)
    _earlier: Conversation = PrivateAttr(default_factory=lambda: Conversation(""))

    def continue_from(self, earlier: Conversation) -> None:
        self._earlier = earlier

    @cached_property
    def answer_format(self) -> AnswerFormat | None:
        f = self.text.format if self.text is not None else None
        return answer_format(f.type, f.model_dump(by_alias=True), "text.format") if f is not None else None

    def file_ids(self) -> list[str]:
        return file_ids(item.content for item in self.input if isinstance(item, InputItem))

    def conversation(self) -> Conversation:
        if self.top_logprobs and LOG_PROBS not in (self.include or ()):
            message = f"`top_logprobs` needs `{LOG_PROBS}` in `include`"
            raise ApiError(400, message, "invalid_value", "top_logprobs")
        unsupported = {
            "text.verbosity": self.text is not None and self.text.verbosity not in (None, "medium"),
            "reasoning.effort": (self.reasoning or {}).get("effort") is not None,
            "include": bool(set(self.include or ()).difference(INCLUDED)),
        }
        refuse_unsupported(unsupported, self.model_extra)
        return read_messages(self._messages(), "input", self._earlier)

    def _messages(self) -> Iterator[ReadMessage]:
        if self.instructions:
            yield ReadMessage("developer", self.instructions.strip())
        if isinstance(self.input, str):
            yield ReadMessage("user", self.input.strip())
            return
        for i, item in enumerate(self.input):
            if item.type == "message":
                if item.role is None:
                    message = f"`input[{i}]` is a message without a role"
                    raise ApiError(400, message, "missing_parameter", f"input[{i}].role")
                yield read_message(item.role, item.content, f"input[{i}]", self._files)
            elif item.type not in ("reasoning", "mcp_call"):
                message = f"items of type `{item.type[:40]}` are not supported: send messages"
                raise ApiError(400, message, "unsupported_part", f"input[{i}]")


class ResponseDeleted(BaseModel):
    """Reply of ``DELETE /v1/responses/{id}``."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseObject(BaseModel):
    """Reply of ``POST /v1/responses`` and ``GET /v1/responses/{id}``.

    ``output`` is the winning sample, in a stream the first: a ``reasoning`` item for each thought, an
    ``mcp_call`` item for each pixel operation, and the ``message`` with the elected answer. ``status`` is
    "incomplete" if no sample reached an answer for want of tokens.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]] = Field(default_factory=list)
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    temperature: float
    top_p: float
    max_output_tokens: int | None = None
    parallel_tool_calls: bool = False
    tool_choice: Literal["auto"] = "auto"
    tools: list[Any] = Field(default_factory=list)
    text: dict[str, Any] = Field(default_factory=lambda: {"format": {"type": "text"}})
    reasoning: dict[str, Any] = Field(default_factory=lambda: {"effort": None, "summary": None})
    truncation: Literal["disabled"] = "disabled"
    metadata: dict[str, str] = Field(default_factory=dict)
    top_logprobs: int = 0
    usage: dict[str, Any] | None = None
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
    items = ResponseEvents(trajectory.dialect, trajectory.id.removeprefix("traj_"))
    for turn in trajectory.turns:
        items.turn(turn)
    tokens = log_probs.model_dump()["content"] if log_probs else []
    items.message(choice.message.content, choice.message.refusal, tokens)
    truncated = choice.finish_reason == "length"
    return {
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "output": items.output,
    }


class ResponsesFormat(ReplyFormat):
    """The ReplyFormat of ``/v1/responses``. A response has the id of its experience."""

    def __init__(self, config: Config, request: ResponsesRequest, started: float):
        super().__init__(config, request.stream, started, request.model)
        stored = request.store is not False
        self.log_probs = LOG_PROBS in (request.include or ())
        self.query = agent_query(
            config,
            request,
            max_tokens=request.max_output_tokens,
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
            instructions=request.instructions,
            previous_response_id=request.previous_response_id,
            store=stored,
            temperature=self.query.sampling.temperature,
            top_p=self.query.sampling.top_p,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            text=(request.text or TextOptions()).shown(),
            top_logprobs=request.top_logprobs or 0,
        )
        self.events = ResponseEvents(config.dialogue.dialect)
        self.thoughts = ThoughtStream(config.dialogue.dialect)

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
        used = Usage.of(answer.group.trajectories)
        usage = {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used.total_tokens,
        }
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
        self.base = self.base.model_copy(update={"id": reply["id"]})
        return {**reply, **own_fields, "completed_at": int(time.time()), "pixelis": fields}

    def stream_start(self) -> str:
        response = self.base.model_dump(mode="json")
        kinds = ("response.created", "response.in_progress")
        return "".join(self.events.event(kind, response=response) for kind in kinds)

    def stream_text(self, event: TextEvent) -> str:
        thought = self.thoughts.add(event.text, event.attempt)
        return "".join(self.events.thinking(thought, event.attempt)) if thought else ""

    def stream_turn(self, event: TurnEvent) -> str:
        if event.sample:
            return ""
        rest = self.thoughts.end(event.turn.text, event.attempt) if event.turn.is_policy else ""
        return "".join(self.events.turn(event.turn, event.attempt, rest))

    def stream_end(self, reply: dict[str, Any]) -> list[str]:
        if self.events.output:
            events = self.events.finish()
        else:  # a cached response, or the policy answered at once
            events = [event for item in reply["output"][:-1] for event in self.events.item(item)]
        (part,) = reply["output"][-1]["content"]
        events += self.events.message(part.get("text"), part.get("refusal"), part.get("logprobs", []))
        response = {**reply, "output": self.events.output}
        return [*events, self.events.event(f"response.{reply['status']}", response=response)]

    def stream_error(self, error: ApiError) -> str:
        details = {"code": error.code, "message": error.message}
        response = self.base.model_copy(update={"status": "failed", "error": details}).model_dump(mode="json")
        return self.events.event("error", **details, param=error.param) + self.events.event(
            "response.failed", response=response
        )
