"""Configuration of the HTTP service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pixelis.config.base import Section
from pixelis.config.engine import SamplingConfig


class FilesConfig(Section):
    max_files: NonNegativeInt = 100
    """maximum number of uploaded files of a key; 0 refuses uploads"""
    max_bytes: PositiveInt = 500_000_000
    """maximum size of all uploaded files of a key"""
    ttl_s: float = Field(2_592_000.0, ge=3600)
    """seconds after which an uploaded file is deleted"""


class EpisodesConfig(Section):
    max_open: PositiveInt = 256
    """maximum number of open episodes of a key"""
    max_bytes: PositiveInt = 500_000_000
    """maximum size of the messages of a key's open episodes, with their pictures"""
    expires_s: float = Field(3600.0, gt=0, le=86_400)
    """seconds after which an episode without a reward ends, unless it was opened with another number"""


class ServeConfig(Section):
    host: str = "127.0.0.1"
    """address to bind to; any address but loopback requires an API key"""
    port: int = Field(8000, ge=1, le=65535)
    """port of the HTTP gateway"""
    api_key_env: str = "PIXELIS_API_KEY"
    """environment variable with an API key that has every scope"""
    keys: str | None = None
    """file of further API keys, see `pixelis keys`; unset: keys.json in run.dir"""
    samples: PositiveInt = 8
    """k: samples per request that vote"""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0)
    """sampling of the votes"""
    augmentations: list[Literal["grey_world", "autocontrast"]] = Field([])
    """corrections of light that the samples apply to the pictures in turn, the first sample none"""
    causal_use: bool = False
    """measure what each sample's answer owes to its calls, for the page and the reply (docs/looking.md)"""
    priority: int = Field(0, ge=-100, le=100)
    """priority of requests without one; lower goes first"""
    max_body_bytes: int = Field(16_000_000, ge=1024)
    """maximum size of a request body"""
    max_request_pixels: PositiveInt = 100_000_000
    """maximum number of pixels of all pictures of a request, checked before decoding"""
    max_video_seconds: PositiveFloat = 120.0
    """maximum duration of a clip in a request, of at most 30 frames a second"""
    max_question_chars: PositiveInt = 4000
    """maximum length of a question"""
    max_queue: int | None = Field(None, ge=1)
    """waiting requests per replica above which it answers 429; unset: as many as are running"""
    timeout_s: PositiveFloat = 60.0
    """seconds after which a request is cancelled"""
    replicas: int | None = Field(None, ge=1)
    """minimum number of gateway replicas; unset: 2 with at least 4 cores, else 1"""
    max_replicas: int | None = Field(None, ge=1)
    """maximum number of gateway replicas, scaled by load; unset: always `replicas`"""
    upscale_delay_s: NonNegativeFloat = 5.0
    """with engine.max_workers: seconds of high load after which another generator starts"""
    downscale_delay_s: NonNegativeFloat = 60.0
    """with engine.max_workers: seconds of low load after which a generator ends"""
    per_minute: NonNegativeInt = 0
    """requests per client, minute and replica; 0: no limit"""
    per_hour: NonNegativeInt = 0
    """requests per client, hour and replica; 0: no limit"""
    proxies: NonNegativeInt = 0
    """number of trusted reverse proxies, each of which adds an address to X-Forwarded-For"""
    cache: NonNegativeInt = 1000
    """replies per replica that are cached for repeated seeded or greedy requests; 0: none"""
    files: FilesConfig = FilesConfig()
    """uploads (/v1/files)"""
    episodes: EpisodesConfig = EpisodesConfig()
    """episodes of agents that own their loop (/v1/episodes)"""
    read_only: bool = False
    """only answer: no memory, updates, feedback or review, and nothing is written"""
    page: bool = True
    """serve the web page at /"""

    @model_validator(mode="after")
    def _ordered(self) -> ServeConfig:
        if self.max_replicas is not None and self.max_replicas < (self.replicas or 1):
            raise ValueError(
                f"serve.max_replicas {self.max_replicas} is below serve.replicas {self.replicas}"
            )
        return self
