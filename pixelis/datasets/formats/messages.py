"""Reads the messages of a chat, in any usual form, as turns of text and media."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

from pixelis.datasets import fields
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import Row
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Media

_ROLES = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "model", "bot", "chatgpt"),
    "call": ("function_call", "tool_call"),
    "result": ("observation", "tool", "tool_response", "function", "function_response", "ipython"),
    "system": ("system", "developer"),
}
ROLES = {name: role for role, names in _ROLES.items() for name in names}
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"
"""Around each result in the user turn that follows a turn with several calls."""
_PARTS = {"text": "text", "image": "image", "image_url": "image", "video": "video", "video_url": "video"}
"""Key of a part -> what it holds; a part with a ``type`` alone shows a medium from a column of the row."""


@dataclass
class ChatTurn:
    role: str
    text: str
    media: list[Media] = field(default_factory=list)
    is_result: bool = False


def turns_of(row: Row, column: str, root: MediaRoot) -> list[ChatTurn]:
    """The turns of the messages in a column, at least one; consecutive calls or results are one turn."""
    if isinstance(value := row.get(column), str):
        value = fields.parse_json(value, column, list)
    if not (messages := fields.objects({column: value}, column)):
        raise RowError(column, "wrong_type", "the list of messages is empty")
    turns, before = list[ChatTurn](), ""
    for i, message in enumerate(messages):
        place = f"{column}.{i}"
        key = "from" if message.get("from") is not None else "role"
        speaker = str(message.get(key))
        if speaker.lower() not in ROLES:
            text = f"no role {speaker!r}; known are {', '.join(ROLES)}"
            raise RowError(f"{place}.{key}", "unknown_role", text)
        role = ROLES[speaker.lower()]
        turn = ChatTurn({"result": "user", "call": "assistant"}.get(role, role), "", [], role == "result")
        calls = fields.optional(message, "tool_calls", list, [])
        key = next((key for key in ("content", "value", "text") if message.get(key) is not None), "content")
        if message.get(key) is not None or not calls:
            turn.text, turn.media = _content(message.get(key), f"{place}.{key}", root)
        if role == "call":
            turn.text = _written_calls(turn.text, place)
        turn.text = "\n".join(filter(None, (turn.text, *(_tagged(call, place) for call in calls))))
        if role == before == "result":
            turns[-1].text = _response(turns[-1].text) + "\n" + _response(turn.text)
            turns[-1].media += turn.media
        elif role == "call" and before in ("call", "assistant"):
            turns[-1].text += "\n" + turn.text
        else:
            turns.append(turn)
        before = role
    return turns


def show_media(turns: list[ChatTurn], media: list[Media], column: str) -> list[ChatTurn]:
    """The turns with the media of their row, each at the next mark of its kind, or all in the first turn.

    RowError ``media_count`` if marks and media do not fit.
    """
    users = [turn for turn in turns if turn.role == "user"]
    for kind in ("image", "video"):
        left = [item for item in media if item.kind == kind]
        if users and not any(f"<{kind}>" in turn.text for turn in users):
            users[0].media += left
            continue
        for turn in users:
            own = sum(item.kind == kind for item in turn.media)
            if (count := turn.text.count(f"<{kind}>") - own) > len(left) or (own and count):
                raise RowError(column, "media_count", f"the chat has more <{kind}> than the row has of them")
            turn.media += left[:count]
            del left[:count]
        if left:
            message = f"{len(left)} media of the row have no <{kind}> in the chat"
            raise RowError(column, "media_count", message)
    return turns


def _content(value: Any, place: str, root: MediaRoot) -> tuple[str, list[Media]]:
    if isinstance(value, str):
        return value, []
    if not isinstance(value, list) or not all(isinstance(part, dict | str) for part in value):
        raise RowError(place, "wrong_type", "expected text or a list of parts")
    parts = [("text", part) if isinstance(part, str) else _part(part, place) for part in value]
    media = list[Media]()
    for kind, item in parts:
        if kind != "text" and item is not None:
            media += root.media({place: item if kind == "image" else [item]}, **{f"{kind}s": place})
    own = "".join(str(item) for kind, item in parts if kind == "text")
    if "<image>" in own or "<video>" in own:
        return own, media
    return "".join(str(item) if kind == "text" else f"<{kind}>" for kind, item in parts), media


def _part(part: Row, place: str) -> tuple[str, Any]:
    name = str(part.get("type") or "").removeprefix("input_").removeprefix("output_").removesuffix("_url")
    for key, kind in _PARTS.items():
        if (item := part.get(key)) is not None and name in ("", kind):
            return kind, item["url"] if isinstance(item, dict) and "url" in item else item
    if name in ("image", "video"):
        return name, part.get("url") or part.get("path")
    if name == "text":
        return name, ""
    raise RowError(place, "unknown_part", f"a part is {', '.join(_PARTS)}, not {name or ', '.join(part)}")


def _written_calls(text: str, place: str) -> str:
    thought, closing, body = text.rpartition("</think>")
    if "<tool_call>" in body:
        return text
    try:
        calls = json.loads(body)
    except ValueError:  # the parser of the turn says what is wrong
        return f"{thought}{closing}<tool_call>{body}</tool_call>"
    written = [_tagged(call, place) for call in (calls if isinstance(calls, list) else [calls])]
    return thought + closing + "\n".join(written)


def _tagged(call: Any, place: str) -> str:
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RowError(place, "wrong_type", "a call is an object with name and arguments")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # the parser of the turn says what is wrong
            arguments = json.loads(arguments)
    call = {"name": function.get("name"), "arguments": arguments}
    return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"


def _response(text: str) -> str:
    return text if text.lstrip().startswith(RESPONSE) else f"{RESPONSE}{text}{RESPONSE_END}"


def reply_of(answer: Any) -> str:
    first = next(filter(None, answer), "") if isinstance(answer, list) else answer
    return first if isinstance(first, str) else fields.answers({"answer": first}, "answer")[0]
