"""Configuration of the HTTP service."""

from __future__ import annotations

from pydantic import Field, model_validator

from pixelis.config.base import Section
from pixelis.config.engine import SamplingConfig


class ServeConfig(Section):
    host: str = Field("127.0.0.1", description="address to bind; anything but loopback needs an API key")
    port: int = Field(8000, ge=1, le=65535, description="port of the HTTP gateway")
    api_key_env: str = Field("PIXELIS_API_KEY", description="environment variable that holds the API key")
    samples: int = Field(8, ge=1, description="k: samples of a request that vote")
    sampling: SamplingConfig = Field(SamplingConfig(temperature=1.0), description="how the votes are drawn")
    max_body_bytes: int = Field(16_000_000, ge=1024, description="largest request body")
    max_question_chars: int = Field(4000, ge=1, description="longest question")
    max_queue: int | None = Field(
        None, ge=1, description="requests waiting in a replica before it answers 429; unset: as many as run"
    )
    timeout_s: float = Field(60.0, gt=0, description="seconds a request may take; then its rollouts are cancelled")
    replicas: int = Field(1, ge=1, description="gateway replicas at least")
    max_replicas: int | None = Field(
        None, ge=1, description="gateway replicas at most: Serve scales by the load; none: always `replicas`"
    )
    per_minute: int = Field(0, ge=0, description="requests of one client in a minute, in each replica; 0 is no limit")
    per_hour: int = Field(0, ge=0, description="requests of one client in an hour, in each replica; 0 is no limit")
    proxies: int = Field(
        0, ge=0, description="reverse proxies in front; that many last entries of X-Forwarded-For are believed for rate limits"
    )
    cache: int = Field(
        1000, ge=0, description="replies kept by each replica for requests that repeat (seeded or greedy); 0 is none"
    )
    cache_ttl_s: float = Field(3600.0, gt=0, description="seconds a kept reply may be given again")
    read_only: bool = Field(False, description="answer only: no memory, no update, no feedback, no review, nothing written")
    page: bool = Field(True, description="serve the web page at /")

    @model_validator(mode="after")
    def _ordered(self) -> ServeConfig:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"serve.max_replicas {self.max_replicas} is below serve.replicas {self.replicas}")
        return self
