"""The normal form of conversations, from chat messages and from the input items of responses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import Field

from pixelis.dialogue.dialects import strict_json
from pixelis.errors import OperationError
from pixelis.protocol.errors import MAX_NAME_CHARS, ApiError
from pixelis.protocol.parts import Content, LenientModel, check_data_url, read_message

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
    """A message. ``media`` are data URLs; ``call_id`` names the call of a tool's result."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    media: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    call_id: str | None = None


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

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
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


Placed = tuple[Message, str]
"""A message, and where it stands in the request."""


def chat_messages(messages: Sequence[ChatMessage], files: Mapping[str, str]) -> list[Message]:
    """The normal form of a chat; ``files`` are data URLs by id. Raises ApiError 400."""
    placed = list[Placed]()
    for i, body in enumerate(messages):
        place = f"messages[{i}]"
        if body.role == "function":
            raise ApiError(400, f"`{place}`: send results as tool messages", "invalid_value", f"{place}.role")
        message = _read(body.role, body.content, f"{place}.content", files)
        if body.role == "tool":
            message = dataclasses.replace(message, call_id=body.tool_call_id)
        if body.role == "assistant":
            calls = [
                _call(call.id, call.function, f"{place}.tool_calls[{j}].function")
                for j, call in enumerate(body.tool_calls or ())
            ]
            message = dataclasses.replace(message, calls=tuple(calls))
        placed.append((message, place))
    return _answered(placed, "messages", "tool_call_id")


def input_messages(
    items: str | Sequence[InputItem],
    instructions: str | None,
    files: Mapping[str, str],
    earlier: Sequence[Message] = (),
) -> list[Message]:
    """The normal form of a response's input after the ``earlier`` messages, whose instructions it replaces.

    Calls in a row are one message. Raises ApiError 400.
    """
    placed = list[Placed]()
    if instructions:
        placed.append((Message("system", instructions.strip()), "instructions"))
        earlier = earlier[1:] if earlier and earlier[0].role == "system" else earlier
    placed += [(message, "previous_response_id") for message in earlier]
    if isinstance(items, str):
        placed.append((Message("user", items.strip()), "input"))
        items = []
    for i, item in enumerate(items):
        place = f"input[{i}]"
        if item.type == "message":
            if item.role is None:
                message = f"`{place}` is a message without a role"
                raise ApiError(400, message, "missing_parameter", f"{place}.role")
            placed.append((_read(item.role, item.content, f"{place}.content", files), place))
        elif item.type == "function_call":
            if not item.call_id or not item.name:
                message = f"`{place}`: a call needs `call_id` and `name`"
                raise ApiError(400, message, "missing_parameter", place)
            function = CalledFunction(name=item.name, arguments=item.arguments or "")
            said = placed.pop()[0] if placed and placed[-1][0].role == "assistant" else Message("assistant")
            calls = (*said.calls, _call(item.call_id, function, place))
            placed.append((dataclasses.replace(said, calls=calls), place))
        elif item.type == "function_call_output":
            result = _read("tool", item.output, f"{place}.output", files)
            placed.append((dataclasses.replace(result, call_id=item.call_id), place))
        elif item.type not in ("reasoning", "mcp_call"):
            message = f"items of type `{item.type[:40]}` are not supported"
            raise ApiError(400, message, "unsupported_part", place)
    return _answered(placed, "input", "call_id")


def _read(role: Any, content: Any, place: str, files: Mapping[str, str]) -> Message:
    read = read_message(role, content, place, files)
    for url, at in read.images:
        check_data_url(url, "image", at)
    for url, at in read.clips:
        check_data_url(url, "video", at)
    media = tuple(url for url, _ in [*read.images, *read.clips])
    return Message("system" if role == "developer" else role, read.text, media)


def _call(id: str, function: CalledFunction, place: str) -> Call:
    place += ".arguments"
    try:
        arguments = strict_json(function.arguments or "{}")
    except OperationError as error:
        raise ApiError(400, f"`{place}`: {error.message}", "invalid_value", place) from None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"`{place}` must be a JSON object", "invalid_value", place)
    return Call(id, function.name, arguments)


def _answered(placed: Sequence[Placed], param: str, id_field: str) -> list[Message]:
    """The messages, with the results of tools in the order of their calls, which follow at once.

    Raises ApiError 400 for a call without a result, a result without a call, or nothing to reply to.
    """
    messages = list[Message]()
    results: dict[str, Message | None] = {}
    for message, place in placed:
        if message.role == "tool":
            id = message.call_id or ""
            if results.get(id, message) is not None:
                problem = f"`{place}` is the result of no call that waits for one"
                raise ApiError(400, problem, "invalid_value", f"{place}.{id_field}")
            results[id] = message
            if None not in results.values():
                messages += [result for result in results.values() if result is not None]
                results = {}
            continue
        if results:
            raise _unanswered(results, place)
        messages.append(message)
        results = dict.fromkeys(call.id for call in message.calls)
        if len(results) < len(message.calls):
            raise ApiError(400, f"`{place}`: calls share an id", "invalid_value", place)
    if results:
        raise _unanswered(results, param)
    if not messages or messages[-1].role not in ("user", "tool"):
        problem = f"the last of `{param}` must be a user message or the result of a call"
        raise ApiError(400, problem, "unsupported_conversation", param)
    return messages


def _unanswered(results: Mapping[str, Message | None], place: str) -> ApiError:
    missing = next(id for id, result in results.items() if result is None)
    message = f"`{place}`: the result of call {missing[:80]!r} must come first"
    return ApiError(400, message, "missing_tool_result", place)
