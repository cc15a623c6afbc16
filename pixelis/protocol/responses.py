"""OpenAI's responses: the request, its reply, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from pixelis.protocol.answer_format import AnswerFormat, answer_format
from pixelis.protocol.completion import Completion
from pixelis.protocol.errors import (
    MAX_COMMENT_CHARS,
    MAX_NAME_CHARS,
    ApiError,
    PlainText,
    StrictModel,
    invalid,
    text_or,
)
from pixelis.protocol.messages import MAX_MESSAGES, InputItem, Message, answered, input_messages
from pixelis.protocol.parts import file_ids
from pixelis.protocol.request import CompletionBody, refuse_unsupported
from pixelis.protocol.response_events import OutputItems
from pixelis.protocol.tools import ToolBody
from pixelis.records import new_id

MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""Largest ``metadata``, as OpenAI has it."""
LOG_PROBS = "message.output_text.logprobs"
INCLUDED = (LOG_PROBS, "reasoning.encrypted_content", "message.input_image.image_url")
"""Values of ``include``. The last two have no effect: nothing is encrypted, the caller has its input."""


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


class ResponsesBody(CompletionBody):
    """Body of ``POST /v1/responses``: a question as text or messages, perhaps after a stored response.

    ``store`` false stores no experience.
    """

    question_param: ClassVar[str] = "input"
    image_param: ClassVar[str] = "input"

    input: text_or(Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)])  # type: ignore[valid-type]
    instructions: str | None = None
    previous_response_id: PlainText | None = Field(None, max_length=MAX_NAME_CHARS)
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    metadata: Metadata | None = None
    include: list[str] | None = Field(None, max_length=16, fail_fast=True)
    text: TextOptions | None = None
    reasoning: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def has_log_probs(self) -> bool:
        return LOG_PROBS in (self.include or ())

    @cached_property
    def answer_format(self) -> AnswerFormat | None:
        f = self.text.format if self.text is not None else None
        return answer_format(f.type, f.model_dump(by_alias=True), "text.format") if f is not None else None

    def file_ids(self) -> list[str]:
        items = [item for item in self.input if isinstance(item, InputItem)]
        return file_ids(content for item in items for content in (item.content, item.output))

    def writer(self, model: str, dialect: str) -> ResponseWriter:
        return ResponseWriter(self, model, dialect)

    def raw_messages(self) -> list[Message]:
        if self.top_logprobs and not self.has_log_probs:
            raise invalid("top_logprobs", f"it needs `{LOG_PROBS}` in `include`")
        unsupported = {
            "text.verbosity": self.text is not None and self.text.verbosity not in (None, "medium"),
            "reasoning.effort": (self.reasoning or {}).get("effort") is not None,
            "include": bool(set(self.include or ()).difference(INCLUDED)),
        }
        refuse_unsupported(unsupported, self.model_extra)
        return input_messages(self.input, self.instructions, self._files)

    def normal_messages(self) -> list[Message]:
        unsupported = {
            "previous_response_id": self.previous_response_id is not None,
            "include": self.has_log_probs,
            "text.format": self.answer_format is not None,
        }
        refuse_unsupported(unsupported, None)
        return answered(self.raw_messages(), "input", "call_id")


class ResponseReply(BaseModel):
    """A response; its other fields are those of `openai.types.responses.Response`, which describes every item."""

    id: str
    object: Literal["response"] = "response"
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None = None


class ResponseWriter(OutputItems):
    """Writes a response as ``ChatWriter`` does: output items as they arise, then the message and the calls.

    ``base`` has the fields that are known before the reply.
    """

    def __init__(self, body: ResponsesBody, model: str, dialect: str):
        super().__init__(dialect, {tool.name or "" for tool in body.tools or ()})
        choice = body.tool_choice if body.tools and body.tool_choice else "auto"
        if isinstance(choice, ToolBody):
            choice = choice.model_dump(include={"type", "name"})
        self.base: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "usage": None,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "text": (body.text or TextOptions()).shown(),
            "top_logprobs": body.top_logprobs or 0,
            "tools": [tool.model_dump(exclude={"function"}) for tool in body.tools or ()],
            "tool_choice": choice,
            "parallel_tool_calls": bool(body.tools) and body.parallel_tool_calls is not False,
            "reasoning": {"effort": None, "summary": None},
            "truncation": "disabled",
        }

    def reply(self, completions: Sequence[Completion], fields: dict[str, Any]) -> dict[str, Any]:
        (completion,) = completions
        usage = response_usage(completion.prompt_tokens, completion.completion_tokens)
        known = {**self.base, "completed_at": int(time.time()), "usage": usage}
        return {**known, **response_outcome(completion), "pixelis": fields}

    def start(self) -> str:
        for kind in ("response.created", "response.in_progress"):
            self.event(kind, response=self.base)
        return self.take()

    def end(self, reply: dict[str, Any]) -> str:
        last = [item for item in reply["output"] if item["type"] in ("message", "function_call")]
        if self.output:
            self.finish()
        else:  # a cached response, or the policy answered at once
            for item in reply["output"]:
                if item not in last:
                    self.item(item)
        for item in last:
            if item["type"] == "message":
                (part,) = item["content"]
                self.message(part.get("text"), part.get("refusal"), part.get("logprobs", []))
            else:
                self.function_call(item["call_id"], item["name"], item["arguments"])
        self.event(f"response.{reply['status']}", response={**reply, "output": self.output})
        return self.take()

    def error(self, error: ApiError) -> str:
        details = {"code": error.code, "message": error.message}
        self.event("error", **details, param=error.param)
        self.event("response.failed", response={**self.base, "status": "failed", "error": details})
        return self.take()


def response_outcome(completion: Completion) -> dict[str, Any]:
    """Status and output of a response: a ``reasoning`` item for each thought, an ``mcp_call`` item for each
    pixel operation, then the ``message`` and the client's calls.

    ``status`` is "incomplete" if there is no answer for want of tokens.
    """
    items = OutputItems(completion.dialect, completion.functions, completion.ids)
    for turn in completion.turns:
        items.turn(turn)
    items.finish()
    if completion.text is not None or completion.refusal is not None:
        tokens = completion.log_probs["content"] if completion.log_probs else []
        items.message(completion.text, completion.refusal, tokens)
    for call in completion.calls:
        items.function_call(call.id, call.name, call.json)
    truncated = completion.finish == "length"
    return {
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "output": items.output,
    }


def response_usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
