"""Configuration of language models behind an OpenAI-compatible API."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from pixelis.config.base import Section


class LlmConfig(Section):
    url: str | None = None
    """base URL of an OpenAI-compatible API, e.g. http://models:8000/v1; unset: no model"""
    model: str = ""
    """name of the model"""
    api_key_env: str
    """environment variable with the API key; empty: no key is sent"""
    tries: PositiveInt = 3
    """maximum number of requests for a usable reply"""
    timeout_s: PositiveFloat = 30.0
    """timeout in seconds of a request"""

    @property
    def total_timeout_s(self) -> float:
        return self.tries * self.timeout_s
