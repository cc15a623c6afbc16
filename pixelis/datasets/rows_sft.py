"""Chats of the seed systems into ``Demonstration``: the calls are read by the dialect they are written in.

Only what the assistant says is kept. Observations are made anew when a demonstration is played, so that the pictures of later
turns are needed for their number and size alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pixelis.datasets.fields import Fields, RowError
from pixelis.datasets.readers.places import header_size
from pixelis.dialogue.dialects import DIALECTS, Dialect
from pixelis.operations import OPERATIONS
from pixelis.operations.scale import Scale
from pixelis.records import Demonstration, Media, Step

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
ROLES |= {"observation": "user", "tool": "user", "function_response": "user"}
REFUSED = re.compile(r"\s*(<tool_response>)?\s*(execution error|error\b)", re.IGNORECASE)
"""How an observation begins that says what was wrong with the call before."""


@dataclass
class Said:
    """One turn of a chat: who, the text, and its pictures and clips."""

    role: str
    text: str
    media: list[Media] = field(default_factory=list)


def read_message_list(row: Fields, name: str) -> Demonstration:
    """Pixel-Reasoner's ``message_list``: contents are lists of ``{text}``, ``{image}`` and ``{video: [frames]}``."""
    chat = []
    for i, message in enumerate(_messages(row, "message_list")):
        parts, column = message.get("content"), f"message_list.{i}.content"
        parts = [{"text": parts}] if isinstance(parts, str) else parts
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise RowError(column, "wrong_type", "a list of parts is wanted")
        said = Said(_role(message.get("role"), f"message_list.{i}.role"), "")
        for part in parts:
            if part.get("text") is not None:
                said.text += str(part["text"])
            elif part.get("image") is not None:
                said.media += Fields({column: part["image"]}, row.root).media(column)
            elif part.get("video") is not None:
                said.media += Fields({column: [part["video"]]}, row.root).media(None, column)
        chat.append(said)
    return _demonstration(row, name, chat, ("message_list",))


def read_messages(row: Fields, name: str) -> Demonstration:
    """ShareGPT as ``messages`` of ``role`` and ``content`` with ``images``: Reason-RFT's."""
    return _sharegpt(row, name, "messages", "role", "content")


def read_conversations(row: Fields, name: str) -> Demonstration:
    """ShareGPT as ``conversations`` of ``from`` and ``value`` with ``images``: Mini-o3's."""
    return _sharegpt(row, name, "conversations", "from", "value")


def _sharegpt(row: Fields, name: str, column: str, who: str, what: str) -> Demonstration:
    chat = []
    pictures = row.media("images" if "images" in row else "image", "videos")
    images = [item for item in pictures if item.kind == "image"]
    clips = [item for item in pictures if item.kind == "video"]
    for i, message in enumerate(_messages(row, column)):
        text = message.get(what)
        if not isinstance(text, str):
            raise RowError(f"{column}.{i}.{what}", "wrong_type", "text is wanted")
        said = Said(_role(message.get(who), f"{column}.{i}.{who}"), text)
        if said.role == "user":
            for mark, left in (("<image>", images), ("<video>", clips)):
                count = text.count(mark)
                if count > len(left):
                    raise RowError(column, "media_count", f"there are more {mark} than of them")
                said.media += left[:count]
                del left[:count]
        chat.append(said)
    first = next((said for said in chat if said.role == "user"), None)
    if (images or clips) and first is not None:
        if any(said.media for said in chat):
            raise RowError(column, "media_count", f"{len(images) + len(clips)} pictures have no <image> or <video>")
        first.media = [*images, *clips]
    return _demonstration(row, name, chat, (column, "images", "image", "videos"))


def _demonstration(row: Fields, name: str, chat: list[Said], used: tuple[str, ...]) -> Demonstration:
    column = used[0]
    system = "\n".join(said.text for said in chat if said.role == "system")
    chat = [said for said in chat if said.role != "system"]
    if not chat or chat[0].role != "user":
        raise RowError(column, "no_question", "the chat does not begin with a user")
    asked = _numbered(chat[0].media)
    dialect = _dialect([said.text for said in chat if said.role == "assistant"])
    steps: list[Step] = []
    successes = 0
    sizes, clips = _Sizes(), [item.id for item in asked if item.kind == "video"]
    for item in asked:
        frames = [f"{item.id}.{i}" for i in range(len(item.frames or []))]
        for key, path in zip(
            [item.id, *frames], [item.frames[0] if item.frames else item.uri, *(item.frames or [])], strict=True
        ):
            sizes.add(key, path)
    for i, said in enumerate(chat[1:], 1):
        if said.role == chat[i - 1].role:  # a call has one observation: with none or two, later ones would be called otherwise
            raise RowError(column, "out_of_turn", f"turn {i}: the {said.role} speaks twice")
        if said.role == "user":
            if not steps or steps[-1].op is None:
                raise RowError(column, "second_question", f"turn {i} asks again: a demonstration has one question")
            if not said.media and REFUSED.match(said.text):
                steps[-1] = steps[-1].model_copy(update={"learn": False})
                continue
            successes += 1
            seen = [path for item in said.media for path in (item.frames or [item.uri])]
            names = [f"obs{successes}"] if len(seen) == 1 else [f"obs{successes}.{k}" for k in range(len(seen))]
            for key, path in zip(names, seen, strict=True):
                sizes.add(key, path)
            continue
        if steps and steps[-1].answer is not None:
            raise RowError(column, "second_answer", f"turn {i} goes on after the answer")
        scale = Scale("thousand", sizes, clips=tuple(clips))  # dialects with a scale of their own put it in its place
        steps.append(_step(said.text, dialect, scale, last=i == len(chat) - 1, column=f"{column}.{i}"))
    if not steps or steps[-1].answer is None:
        raise RowError(column, "no_answer", "the chat does not end with an answer")
    answers = row.answers("answer") if "answer" in row else [steps[-1].answer]
    meta = row.rest(*used, "id", "qid", "doc_id", "answer") | ({"system": system} if system else {})
    return Demonstration(
        id=row.name("id", "qid", "doc_id") or name,
        question=row.question(chat[0].text, column, asked),
        media=asked,
        answers=answers,
        task=row.name("data_source") or "qa",
        turns=steps,
        meta=meta,
    )


def _step(text: str, dialect: Dialect, scale: Scale, last: bool, column: str) -> Step:
    reply = dialect.parse(text, OPERATIONS, scale)
    if reply.error is not None:
        raise RowError(column, reply.error.code, reply.error.message)
    think = (reply.think or "").strip() or None
    if reply.action is not None:
        return Step(think=think, op=reply.action.op, target=reply.action.target, arguments=reply.action.arguments)
    if reply.answer is not None:
        return Step(think=think, answer=reply.answer)
    if not last:
        raise RowError(column, "no_action", "the turn neither calls an operation nor answers")
    rest = text.partition("</think>")[2] if "</think>" in text else text
    if not rest.strip():
        raise RowError(column, "no_answer", "the last turn is empty")
    return Step(think=think if "</think>" in text else None, answer=rest.strip())


def _dialect(said: list[str]) -> Dialect:
    """The dialect of a chat, by the names of what it calls."""
    text = "\n".join(said)
    if "<grounding>" in text:
        return DIALECTS["mini_o3"]
    if "image_zoom_in_tool" in text or "image_rotate_tool" in text:
        return DIALECTS["deepeyes"]
    if "crop_image_normalized" in text or "target_frames" in text:
        return DIALECTS["pixel_reasoner"]
    if "<tool_call>" in text:
        return DIALECTS["qwen"]
    return DIALECTS["pixel_reasoner" if "\\boxed" in text and "<answer>" not in text else "plain"]


class _Sizes(dict[str, tuple[int, int]]):
    """Width and height of pictures by their ids in order; the header of a file is read when a call needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[str, str] = {}

    def add(self, key: str, path: str) -> None:
        self.paths[key], self[key] = path, (0, 0)

    def get(self, key: str, default: Any = None) -> Any:
        if key in self.paths and not self.paths[key].startswith(("data:", "cards:", "packaged:")):
            self[key] = header_size(Path(self.paths.pop(key)), key)
        return super().get(key, default)


def _numbered(media: list[Media]) -> list[Media]:
    counts = {"image": 0, "video": 0}
    out = []
    for item in media:
        prefix = "img" if item.kind == "image" else "vid"
        out.append(item.model_copy(update={"id": f"{prefix}{counts[item.kind]}"}))
        counts[item.kind] += 1
    return out


def _messages(row: Fields, column: str) -> list[dict[str, Any]]:
    value = row.get(column)
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise RowError(column, "wrong_type", "a list of messages is wanted")
    return value


def _role(value: Any, column: str) -> str:
    if value not in ROLES:
        raise RowError(column, "unknown_role", f"no role {value!r}; known are {', '.join(ROLES)}")
    return ROLES[value]
