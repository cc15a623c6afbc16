"""The normal form of conversations, from chat messages and from the input items of responses."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from pydantic import Field

from pixelis.dialogue.dialects import strict_json
from pixelis.errors import OperationError
from pixelis.protocol.errors import MAX_NAME_CHARS, invalid
from pixelis.protocol.parts import MEDIA, Content, LenientModel, kind_url

MAX_MESSAGES = 512
MAX_CALLS = 64
"""Most calls of one message."""
MAX_ARGUMENTS_CHARS = 65_536


class Call(NamedTuple):
    """The call of a tool that the client runs."""

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def json(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Message:
    """A message. ``media`` are data URLs, those of clips ``data:video/...``.

    ``call_id`` names the call of a tool's result. ``place`` and ``places``: where it and its media stand in the
    request.
    """

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    media: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    place: str = field(default="", compare=False)
    places: tuple[str, ...] = field(default=(), compare=False)


class CalledFunction(LenientModel):
    """Name and arguments of a call, the arguments as JSON text."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    arguments: str = Field("", max_length=MAX_ARGUMENTS_CHARS)


class ToolCall(LenientModel):
    """A call in a chat message."""

    id: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(LenientModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_CALLS, fail_fast=True)
    tool_call_id: str | None = Field(None, max_length=MAX_NAME_CHARS)


class InputItem(LenientModel):
    """A message, a call with its result, or another item of an earlier output."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: str | None = Field(None, max_length=MAX_NAME_CHARS)
    name: str | None = Field(None, max_length=MAX_NAME_CHARS)
    arguments: str | None = Field(None, max_length=MAX_ARGUMENTS_CHARS)
    output: Content | None = None


def chat_messages(messages: Sequence[ChatMessage], files: Mapping[str, str]) -> list[Message]:
    """The messages of a chat; ``files`` are data URLs by id. Raises ApiError 400."""
    read = list[Message]()
    for i, body in enumerate(messages):
        place = f"messages[{i}]"
        message = _message(body.role, body.content, place, "content", files)
        if body.role == "tool":
            message = replace(message, call_id=body.tool_call_id)
        if body.role == "assistant":
            calls = [
                _call(call.id, call.function, f"{place}.tool_calls[{j}].function")
                for j, call in enumerate(body.tool_calls or ())
            ]
            message = replace(message, calls=tuple(calls))
        read.append(message)
    return read


def input_messages(
    items: str | Sequence[InputItem], instructions: str | None, files: Mapping[str, str]
) -> list[Message]:
    """The messages of a response's input; calls in a row are one message. Raises ApiError 400."""
    read = [Message("system", instructions.strip(), place="instructions")] if instructions else []
    if isinstance(items, str):
        return [*read, Message("user", items.strip(), place="input")]
    for i, item in enumerate(items):
        place = f"input[{i}]"
        if item.type == "message":
            if item.role is None:
                raise invalid(f"{place}.role", "a message has a role", "missing_parameter")
            read.append(_message(item.role, item.content, place, "content", files))
        elif item.type == "function_call":
            if not item.call_id or not item.name:
                raise invalid(place, "a call has a `call_id` and a `name`", "missing_parameter")
            call = _call(item.call_id, CalledFunction(name=item.name, arguments=item.arguments or ""), place)
            is_reply = read[-1:] and read[-1].role == "assistant"
            said = read.pop() if is_reply else Message("assistant", place=place)
            read.append(replace(said, calls=(*said.calls, call)))
        elif item.type == "function_call_output":
            result = _message("tool", item.output, place, "output", files)
            read.append(replace(result, call_id=item.call_id))
        elif item.type not in ("reasoning", "mcp_call"):
            problem = f"items of type `{item.type[:40]}` are not supported"
            raise invalid(place, problem, "unsupported_part")
    return read


def _message(role: str, content: Any, place: str, field: str, files: Mapping[str, str]) -> Message:
    texts = [] if isinstance(content, list) else [(content or "").strip()]
    media = dict[str, str]()
    for j, part in enumerate(content if isinstance(content, list) else ()):
        at = f"{place}.{field}[{j}]"
        if part.type in ("text", "input_text", "output_text"):
            if part.text is None:
                raise invalid(at, f"a part of type `{part.type}` needs `text`")
            texts.append(part.text.strip())
        elif part.type in MEDIA:
            if role not in ("user", "tool"):
                raise invalid(at, f"pictures belong in a user or tool message, not in a {role} message")
            url = part.medium.data_url(files, MEDIA[part.type], at)
            media[at] = kind_url(url, MEDIA[part.type], at)
        elif part.type != "refusal":  # which adds nothing: the reply has no answer
            problem = f"parts of type `{part.type[:40]}` are not supported: send text, pictures and clips"
            raise invalid(at, problem, "unsupported_part")
    text, role = "\n".join(filter(None, texts)), "system" if role == "developer" else role
    return Message(role, text, tuple(media.values()), place=place, places=tuple(media))  # type: ignore[arg-type]


def _call(id: str, function: CalledFunction, place: str) -> Call:
    place += ".arguments"
    try:
        arguments = strict_json(function.arguments or "{}")
    except OperationError as error:
        raise invalid(place, error.message) from None
    if not isinstance(arguments, dict):
        raise invalid(place, "the arguments of a call are a JSON object")
    return Call(id, function.name, arguments)


def answered(messages: Iterable[Message], param: str, id_field: str) -> list[Message]:
    """The messages of ``param``, with the results of tools in the order of their calls, which follow at once.

    Raises ApiError 400 for a call without a result, a result without a call, or nothing to reply to.
    """
    out = list[Message]()
    results: dict[str | None, Message | None] = {}
    for message in [*messages, None]:
        waiting = [id for id, result in results.items() if result is None]
        if message is not None and message.role == "tool":
            if message.call_id not in waiting:
                raise invalid(f"{message.place}.{id_field}", "no call waits for this result")
            results[message.call_id] = message
            continue
        if waiting:
            place = message.place if message is not None else param
            raise invalid(place, f"the result of call {waiting[0]!r} must come first", "missing_tool_result")
        out += [result for result in results.values() if result is not None]
        if message is not None:
            out.append(message)
            results = dict.fromkeys(call.id for call in message.calls)
            if len(results) < len(message.calls):
                raise invalid(message.place, "calls share an id")
    if not out or out[-1].role not in ("user", "tool"):
        problem = "the last message must be a user message or the result of a call"
        raise invalid(param, problem, "unsupported_conversation")
    return out
