"""OpenAI's chat completions: the request, its reply and its streamed chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field

from pixelis.protocol.answer_format import AnswerFormat, answer_format
from pixelis.protocol.completion import Completion
from pixelis.protocol.errors import ApiError, invalid, text_or
from pixelis.protocol.messages import MAX_MESSAGES, ChatMessage, Message, answered, chat_messages
from pixelis.protocol.parts import LenientModel, file_ids
from pixelis.protocol.request import CompletionBody, refuse_unsupported
from pixelis.protocol.stream import ThoughtStream, sse_event
from pixelis.records import Turn, new_id

MAX_STOPS = 4


class StreamOptions(LenientModel):
    """Whether a stream ends with the number of tokens."""

    include_usage: bool = False


class ChatBody(CompletionBody):
    """Body of ``POST /v1/chat/completions``.

    ``n`` choices are the elected answer and the answers of other samples; ``stop`` cuts each.
    """

    question_param: ClassVar[str] = "messages"
    image_param: ClassVar[str] = "messages"

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

    def writer(self, model: str, dialect: str) -> ChatWriter:
        return ChatWriter(self, model, dialect)

    def raw_messages(self) -> list[Message]:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "it needs `logprobs` to be true")
        answers = self.answer_format
        unsupported = {
            "web_search_options": self.web_search_options is not None,
            "stop": bool(self.stop) and answers is not None,  # would cut JSON
        }
        refuse_unsupported(unsupported, self.model_extra)
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


class ChatWriter:
    """Writes a chat completion, whole or as server-sent events.

    A stream has thoughts as they are generated (``reasoning``, as vLLM names it), then the message of each
    choice.
    """

    def __init__(self, body: ChatBody, model: str, dialect: str):
        self.include_usage = body.stream_options is not None and body.stream_options.include_usage
        self.thoughts = ThoughtStream(dialect)
        self.base: dict[str, Any] = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": model}
        self.fingerprint: str | None = None

    def reply(self, completions: Sequence[Completion], fields: dict[str, Any]) -> dict[str, Any]:
        """The reply with a choice for each completion; ``fields`` are those that OpenAI's format lacks."""
        first = completions[0]
        usage = {
            "prompt_tokens": first.prompt_tokens,
            "completion_tokens": first.completion_tokens,
            "total_tokens": first.prompt_tokens + first.completion_tokens,
        }
        return {
            **self.base,
            "object": "chat.completion",
            "system_fingerprint": f"policy-{first.version}",
            "choices": [_choice(index, completion) for index, completion in enumerate(completions)],
            "usage": usage,
            "pixelis": fields,
        }

    def start(self) -> str:
        return sse_event(self.chunk({"role": "assistant", "content": ""}))

    def text(self, text: str, attempt: int = 0) -> str:
        """The event for a piece of text of the next turn, or ""."""
        return self._reasoning(self.thoughts.add(text, attempt))

    def turn(self, turn: Turn, attempt: int = 0) -> str:
        """The event for what a whole turn adds, or ""."""
        return self._reasoning(self.thoughts.end(turn.text, attempt)) if turn.is_policy else ""

    def end(self, reply: dict[str, Any]) -> str:
        """The last events, for the ``reply`` that a request without a stream gets."""
        self.fingerprint = reply["system_fingerprint"]
        chunks = [chunk for choice in reply["choices"] for chunk in self._chunks(choice)]
        chunks[-1] |= {"pixelis": reply["pixelis"]}
        if self.include_usage:
            chunks.append({**self.chunk({}), "choices": [], "usage": reply["usage"]})
        return "".join(map(sse_event, chunks)) + "data: [DONE]\n\n"

    def error(self, error: ApiError) -> str:
        """The last event of a request that failed, which the official client raises."""
        return sse_event(error.body())

    def _reasoning(self, thought: str) -> str:
        return sse_event(self.chunk({"reasoning": thought})) if thought else ""

    def _chunks(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        index, message = choice["index"], choice["message"]
        # The first choice has begun with the stream
        delta = {"role": "assistant"} if index else {}
        delta |= {name: message[name] for name in ("content", "refusal") if message[name] is not None}
        chunks = [self.chunk(delta, index=index, logprobs=choice["logprobs"])] if delta else []
        for place, call in enumerate(message["tool_calls"] or ()):
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
        kind = {"object": "chat.completion.chunk", "system_fingerprint": self.fingerprint}
        return {**self.base, **kind, "choices": [choice]}


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.json}}
        for call in completion.calls
    ]
    message = {
        "role": "assistant",
        "content": completion.text,
        "refusal": completion.refusal,
        "reasoning": completion.thought or None,
        "tool_calls": calls or None,
    }
    return {
        "index": index,
        "message": message,
        "logprobs": completion.log_probs,
        "finish_reason": completion.finish,
    }
