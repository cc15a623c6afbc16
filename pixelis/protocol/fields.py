"""Fields of OpenAI's and vLLM's requests that are ignored, and those that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pixelis.protocol.errors import ApiError

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
