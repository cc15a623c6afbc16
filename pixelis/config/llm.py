"""Configuration of language models behind an OpenAI-compatible API."""

from __future__ import annotations

from pydantic import Field

from pixelis.config.base import Section


class LlmConfig(Section):
    url: str | None = Field(
        None, description="base URL of an OpenAI-compatible API, e.g. http://models:8000/v1; unset: no model"
    )
    model: str = Field("", description="name of the model")
    api_key_env: str = Field(description="environment variable with the API key; empty: no key is sent")
    tries: int = Field(3, ge=1, description="maximum number of requests for a usable reply")
    timeout_s: float = Field(30.0, gt=0, description="timeout in seconds of a request")

    @property
    def total_timeout_s(self) -> float:
        """Timeout of all requests for a reply, with the pauses between them."""
        return self.tries * self.timeout_s
