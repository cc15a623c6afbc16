"""Shared by OpenAI's two question routes: ignored and refused fields, and messages read as a conversation."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pixelis.records import Exchange
from pixelis.serve.answer_format import OBJECT, AnswerFormat
from pixelis.serve.protocol.errors import ApiError
from pixelis.serve.protocol.question import Conversation, Placed

IGNORED = {
    *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("parallel_tool_calls", "tool_choice", "function_call", "request_id", "cache_salt"),
}
"""Fields of OpenAI and vLLM without influence on the answer to a request without tools."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "best_of": (1,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
}
"""Further values that change nothing; null, false and empty ones never do."""
_BLAND = re.compile(r"you are (an? )?([\w-]+,? (and )?){0,5}(assistant|chatbot|ai|model)[.!]?", re.IGNORECASE)
"""System messages that only name the model's role, which many clients send by default."""


@dataclass(slots=True)
class ReadMessage:
    """A message. A reply without an answer has no text."""

    role: str
    texts: list[str] = field(default_factory=list)
    images: list[Placed] = field(default_factory=list)
    clips: list[Placed] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(filter(None, map(str.strip, self.texts)))

    def add_media(self, url: str, kind: Literal["image", "video"] | None, place: str) -> None:
        """Add a picture or clip; ``kind`` None: by its URL. Raises ApiError 400 unless the user sends it."""
        if self.role != "user":
            message = f"pictures belong in a user message, not in a {self.role} message"
            raise ApiError(400, message, "invalid_value", place)
        is_clip = kind == "video" or (kind is None and url.startswith("data:video/"))
        (self.clips if is_clip else self.images).append((url, place))


def refuse_unsupported(unsupported: Mapping[str, bool], unknown: Mapping[str, Any] | None) -> None:
    """Raises ApiError 400 for the first ``unsupported`` field, or ``unknown`` one that is not neutral."""
    fields = dict(unsupported)
    for name, value in (unknown or {}).items():
        neutral = value is None or value is False or value in ("", [], {}) or value in NEUTRAL.get(name, ())
        fields[name] = name not in IGNORED and not neutral
    for name, present in fields.items():
        if present:
            name = name[:100]
            raise ApiError(400, f"`{name}` is not supported: leave it out", "unsupported_parameter", name)


def unsupported_part(kind: str, supported: str, place: str) -> ApiError:
    message = f"parts of type `{kind[:40]}` are not supported: send {supported} parts"
    return ApiError(400, message, "unsupported_part", place)


def answer_format(kind: Any, schema: Any, param: str) -> AnswerFormat | None:
    """The format ``text`` (None), ``json_object``, or ``json_schema``. Raises ApiError 400."""
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerFormat(OBJECT)
    if kind != "json_schema":
        raise ApiError(
            400, f"`{param}.type` must be text, json_object or json_schema", "invalid_value", f"{param}.type"
        )
    match schema:
        case {"name": str(), "schema": dict() as required}:
            return AnswerFormat(required)
    raise ApiError(400, f"`{param}` needs a `name` and a `schema`", "missing_parameter", param)


def read_messages(
    messages: Iterable[ReadMessage], param: str, earlier: Conversation | None = None
) -> Conversation:
    """The conversation of the messages of ``param``, which continue ``earlier``. Raises ApiError 400.

    User messages in a row are one question, also with a reply without an answer in between.
    """
    conversation = copy.deepcopy(earlier) if earlier is not None else Conversation("")
    texts = [conversation.question] if conversation.question else []
    media = conversation.unnamed
    roles = list[str]()

    def refuse(problem: str) -> ApiError:
        return ApiError(400, problem, "unsupported_conversation", param)

    for i, message in enumerate(messages):
        role, text = message.role, message.text
        if role not in ("system", "developer", "user", "assistant"):
            raise refuse(f"`{param}[{i}]` is a {role} message: the agent executes its operations itself")
        if role in ("system", "developer"):
            if {"user", "assistant"}.intersection(roles):
                raise refuse(f"`{param}[{i}]`: system messages precede the first question")
            text = "" if _BLAND.fullmatch(text) else text
        elif role == "assistant":
            if not roles or roles[-1] != "user":
                raise refuse(f"`{param}[{i}]` answers no question: user and assistant messages alternate")
            if text:
                conversation.history.append(Exchange(question="\n".join(texts), answer=text, media=media))
                texts, media = [], []
        roles.append(role)
        if role != "assistant":
            texts += [text] if text else []
            media += conversation.attach(message.images, message.clips)
    if roles[-1:] != ["user"]:
        raise refuse(f"the last of `{param}` must be a user message: the question")
    conversation.question = "\n".join(texts)
    return conversation
