"""Shared by OpenAI's two question routes: parts of messages, conversations, ignored and refused fields."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from pixelis.records import Exchange
from pixelis.serve.answer_format import OBJECT, AnswerFormat
from pixelis.serve.protocol.errors import ApiError, text_or
from pixelis.serve.protocol.files import Kind, file_url, typed_data_url
from pixelis.serve.protocol.question import MAX_PARTS, Conversation, Placed

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


class LenientModel(BaseModel):
    """A part of a request body that ignores unknown fields."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Medium(LenientModel):
    """A picture or clip: its ``url``, an uploaded file, a file's data, or base64 ``data`` of a ``format``."""

    url: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    data: str | None = None
    format: Literal["mp4", "webm", "gif"] = "mp4"

    def data_url(self, files: Mapping[str, str], kind: Kind | None, place: str) -> str:
        """Raises ApiError 400 if there is none, or of another kind."""
        if self.file_id is not None:
            return file_url(files, self.file_id, kind, place)
        if self.file_data is not None:
            return file_url({"": typed_data_url(self.file_data, place)}, "", kind, place)
        if self.data is not None:
            return f"data:{'image' if self.format == 'gif' else 'video'}/{self.format};base64,{self.data}"
        if self.url is None:
            raise ApiError(400, f"`{place}` has neither an address nor a file", "invalid_value", place)
        return self.url


MEDIA: dict[str, Kind | None] = {
    **dict.fromkeys(("image_url", "image_file", "input_image"), "image"),
    **dict.fromkeys(("video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file")),
}
"""Kind of the content of each type of part, None if it may be either."""


class Part(LenientModel):
    """One part of a message, as chat completions or responses spell it."""

    type: str
    text: str | None = None
    image_url: text_or(Medium) | None = None  # type: ignore[valid-type]
    video_url: text_or(Medium) | None = None  # type: ignore[valid-type]
    input_video: Medium | None = None
    image_file: Medium | None = None
    file: Medium | None = None
    file_id: str | None = None
    file_data: str | None = None

    @property
    def medium(self) -> Medium:
        for medium in (self.image_url, self.video_url, self.input_video, self.image_file, self.file):
            if medium is not None:
                return Medium(url=medium) if isinstance(medium, str) else medium
        return Medium(file_id=self.file_id, file_data=self.file_data)


Content = text_or(Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)])


def file_ids(contents: Iterable[str | list[Part] | None]) -> list[str]:
    """The uploaded files that messages with these contents name."""
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [id for part in parts if (id := part.medium.file_id) is not None]


class ReadMessage(NamedTuple):
    """A message. A reply without an answer has no text."""

    role: str
    text: str
    images: Sequence[Placed] = ()
    clips: Sequence[Placed] = ()


def read_message(
    role: str, content: str | list[Part] | None, param: str, files: Mapping[str, str]
) -> ReadMessage:
    """The message at ``param``, with the data URLs of uploaded files. Raises ApiError 400."""
    if not isinstance(content, list):
        return ReadMessage(role, (content or "").strip())
    texts, images, clips = list[str](), list[Placed](), list[Placed]()
    for j, part in enumerate(content):
        place = f"{param}.content[{j}]"
        if part.type in ("text", "input_text", "output_text"):
            if part.text is None:
                raise ApiError(400, f"a part of type `{part.type}` needs `text`", "invalid_value", place)
            texts.append(part.text.strip())
        elif part.type in MEDIA:
            if role != "user":
                message = f"pictures belong in a user message, not in a {role} message"
                raise ApiError(400, message, "invalid_value", place)
            kind = MEDIA[part.type]
            url = part.medium.data_url(files, kind, place)
            is_clip = kind == "video" or (kind is None and url.startswith("data:video/"))
            (clips if is_clip else images).append((url, place))
        elif part.type != "refusal":  # which adds nothing: the reply has no answer
            message = f"parts of type `{part.type[:40]}` are not supported: send text, pictures and clips"
            raise ApiError(400, message, "unsupported_part", place)
    return ReadMessage(role, "\n".join(filter(None, texts)), images, clips)


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

    for i, (role, text, images, clips) in enumerate(messages):
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
            media += conversation.attach(images, clips)
    if roles[-1:] != ["user"]:
        raise refuse(f"the last of `{param}` must be a user message: the question")
    conversation.question = "\n".join(texts)
    return conversation
