"""OpenAI's chat completions: the request, its reply and its streamed chunks, and the list of models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from pixelis.protocol.answer_format import AnswerFormat, answer_format
from pixelis.protocol.completion import TRUNCATED, Completion
from pixelis.protocol.errors import ApiError, invalid, text_or
from pixelis.protocol.log_probs import LogProbs
from pixelis.protocol.messages import (
    MAX_MESSAGES,
    CalledFunction,
    ChatMessage,
    Message,
    ToolCall,
    answered,
    chat_messages,
)
from pixelis.protocol.parts import LenientModel, file_ids
from pixelis.protocol.request import CompletionBody, refuse_unsupported
from pixelis.protocol.stream import ThoughtStream, sse_event
from pixelis.records import Trajectory, Turn, new_id

MAX_STOPS = 4


class StreamOptions(LenientModel):
    """Whether a stream ends with the number of tokens."""

    include_usage: bool = False


class ChatBody(CompletionBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    stream_options: StreamOptions | None = None
    stop: text_or(Annotated[list[str], Field(max_length=MAX_STOPS)]) | None = None  # type: ignore[valid-type]
    logprobs: bool | None = None
    web_search_options: Any = None
    response_format: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @cached_property
    def answer_format(self) -> AnswerFormat | None:
        f = self.response_format or {}
        return answer_format(f.get("type", "text"), f.get("json_schema"), "response_format")

    def file_ids(self) -> list[str]:
        return file_ids(message.content for message in self.messages)

    def check_fields(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "it needs `logprobs` to be true")
        answers = self.answer_format
        unsupported = {
            "web_search_options": self.web_search_options is not None,
            "stop": bool(self.stop) and answers is not None,  # would cut JSON
        }
        refuse_unsupported(unsupported, self.model_extra)

    def raw_messages(self) -> list[Message]:
        self.check_fields()
        return chat_messages(self.messages, self._files)

    def normal_messages(self) -> list[Message]:
        # A reply that is cut, or one of several, would not be what the policy said
        unsupported = {
            "n": self.n not in (None, 1),
            "stop": bool(self.stop),
            "logprobs": bool(self.logprobs),
            "response_format": self.answer_format is not None,
        }
        refuse_unsupported(unsupported, None)
        return answered(self.raw_messages(), "messages", "tool_call_id")


class Usage(BaseModel):
    """Tokens of a request: the prompt once, because samples share it, and the replies of all samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, trajectories: list[Trajectory]) -> Usage:
        turns = trajectories[0].turns if trajectories else []
        first_reply = next((i for i, turn in enumerate(turns) if turn.is_policy), len(turns))
        prompt = sum(len(turn.tokens) for turn in turns[:first_reply])
        completion = sum(len(turn.tokens) for t in trajectories for turn in t.turns if turn.is_policy)
        return cls.sum(prompt, completion)

    @classmethod
    def sum(cls, prompt: int, completion: int) -> Usage:
        return cls(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class ReplyMessage(BaseModel):
    """``content`` is null without an answer; ``refusal`` then gives the reason, if there is no call."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(BaseModel):
    """The answer of one sample."""

    index: int = 0
    message: ReplyMessage
    logprobs: LogProbs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]

    @classmethod
    def of(cls, index: int, content: str | None, trajectory: Trajectory, stops: Sequence[str]) -> Choice:
        """The choice of a sample with the answer ``content``, which ends before the first of ``stops``."""
        reason, refusal = trajectory.stop_reason.value, None
        if content is None:
            who = "this sample reached no" if index else "no sample reached an"
            refusal = f"{who} answer ({reason})"
        else:
            ends = [place for stop in stops if (place := content.find(stop)) >= 0]
            content = content[: min(ends, default=None)]
        truncated = content is None and reason in TRUNCATED
        message = ReplyMessage(content=content, refusal=refusal)
        return cls(index=index, message=message, finish_reason="length" if truncated else "stop")


class ChatReply(BaseModel):
    """Reply of ``POST /v1/chat/completions``."""

    id: str = Field(default_factory=lambda: new_id("chatcmpl"))
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage


def chat_reply(completion: Completion, model: str) -> dict[str, Any]:
    """The chat completion of a reply in an episode."""
    calls = [
        ToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.json))
        for call in completion.calls
    ]
    message = ReplyMessage(
        content=completion.text,
        refusal=completion.refusal,
        reasoning=completion.thought or None,
        tool_calls=calls or None,
    )
    reply = ChatReply(
        model=model,
        system_fingerprint=f"policy-{completion.version}",
        choices=[Choice(message=message, logprobs=completion.log_probs, finish_reason=completion.finish)],
        usage=Usage.sum(completion.prompt_tokens, completion.completion_tokens),
    )
    return {**reply.model_dump(mode="json"), "pixelis": completion.fields}


class ChatStream:
    """The chunks of a chat completion: thoughts as they are generated (``reasoning``, as vLLM names it), then
    the message of each choice.
    """

    def __init__(self, model: str, dialect: str, include_usage: bool = False):
        self.include_usage = include_usage
        self.thoughts = ThoughtStream(dialect)
        self.base: dict[str, Any] = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    def start(self) -> str:
        return sse_event(self.chunk({"role": "assistant", "content": ""}))

    def text(self, text: str, attempt: int = 0) -> str:
        """The event for a piece of text of the next turn, or ""."""
        thought = self.thoughts.add(text, attempt)
        return sse_event(self.chunk({"reasoning": thought})) if thought else ""

    def turn(self, turn: Turn, attempt: int = 0) -> str:
        """The event for what a whole turn adds, or ""."""
        rest = self.thoughts.end(turn.text, attempt) if turn.is_policy else ""
        return sse_event(self.chunk({"reasoning": rest})) if rest else ""

    def end(self, reply: dict[str, Any]) -> list[str]:
        """The last events, for the reply that a request without a stream gets."""
        self.base["system_fingerprint"] = reply["system_fingerprint"]
        chunks = [chunk for choice in reply["choices"] for chunk in self._choice(choice)]
        chunks[-1] |= {"pixelis": reply["pixelis"]}
        if self.include_usage:
            chunks.append({**self.base, "choices": [], "usage": reply["usage"]})
        return [*map(sse_event, chunks), "data: [DONE]\n\n"]

    def error(self, error: ApiError) -> str:
        """The last event of a request that failed, which the official client raises."""
        return sse_event(error.body())

    def _choice(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        index, message = choice["index"], choice["message"]
        # The first choice has begun with the stream
        delta = {"role": "assistant"} if index else {}
        delta |= {name: message[name] for name in ("content", "refusal") if message[name] is not None}
        chunks = [self.chunk(delta, index=index, logprobs=choice["logprobs"])] if delta else []
        for place, call in enumerate(message.get("tool_calls") or ()):
            named = {**call, "function": {**call["function"], "arguments": ""}}
            arguments = {"function": {"arguments": call["function"]["arguments"]}}
            chunks += [
                self.chunk({"tool_calls": [{"index": place, **part}]}, index=index)
                for part in (named, arguments)
            ]
        return [*chunks, self.chunk({}, choice["finish_reason"], index)]

    def chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, index: int = 0, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self.base, "choices": [choice]}


class ModelCard(BaseModel):
    """A model that the service serves."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pixelis"


class ModelList(BaseModel):
    """Reply of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
