"""Fields that requests share, fields that are ignored, and those that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from pixelis.dialogue.session import MAX_TOP_LOG_PROBS
from pixelis.protocol.errors import MAX_NAME_CHARS, ApiError, PlainText
from pixelis.protocol.messages import Message
from pixelis.protocol.tools import ToolsBody

MAX_PRIORITY = 100
IGNORED = {
    *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("function_call", "request_id", "cache_salt"),
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


class Request(BaseModel):
    """The fields of all questions. ``use_files`` gives the data URLs of the files that ``file_ids`` names.

    The class variables name fields in error messages.
    """

    question_param: ClassVar[str] = "question"
    image_param: ClassVar[str] = "image"

    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    user: PlainText | None = Field(None, max_length=MAX_NAME_CHARS)
    _files: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def use_files(self, urls: Mapping[str, str]) -> None:
        self._files = urls

    def file_ids(self) -> list[str]:
        raise NotImplementedError


class CompletionBody(Request, ToolsBody):
    """The fields of OpenAI's two question routes.

    Unknown fields and those that would change the reply but are not supported (``background``, ``top_k``, ...)
    are errors.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    stream: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOG_PROBS)

    @property
    def token_limit(self) -> int | None:
        raise NotImplementedError

    def normal_messages(self) -> list[Message]:
        """The messages of a request that an episode goes on with. Raises ApiError 400."""
        raise NotImplementedError


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
