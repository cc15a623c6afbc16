"""Configuration of the pixel operations and the limits they run under."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pixelis.config.base import Section


class ToolboxConfig(Section):
    operations: list[str] = Field(
        ["zoom_in", "segment_object_at", "get_properties", "read_text", "track_object", "select_frames"]
    )
    """pixel operations that the policy may call; your own as `package.module:Class`"""
    environments: list[str] = Field([])
    """environments that a question may name (`environment`, `env_name` of a DeepEyes row), as
    `package.module:Class`, `path.py:Class`, `mcp:COMMAND`, `mcp+https://...`, `gym:ID` or `openenv+https://...`
    (docs/operations.md); their episodes live in the toolbox and share its memory_bytes
    """
    workers: PositiveInt = 1
    """toolbox actors per generator"""
    cpus: NonNegativeFloat = 0.25
    """CPUs that each toolbox reserves"""
    gpus: NonNegativeFloat = 0
    """GPUs that each toolbox reserves, for a SAM segmenter; 0: it runs on the CPU"""
    timeout_s: PositiveFloat = 30.0
    """timeout in seconds of an operation"""
    memory_bytes: int = Field(2_000_000_000, ge=100_000_000)
    """memory that an operation may use beyond the idle toolbox"""
    cache_bytes: NonNegativeInt = 256_000_000
    """size of each generator's cache for repeated calls; a quarter more for pictures"""
    max_image_bytes: PositiveInt = 20_000_000
    """maximum size of an encoded image"""
    max_image_pixels: PositiveInt = 50_000_000
    """maximum number of pixels of an image, checked before decoding"""
    video_backend: Literal["pyav", "decord"] = "pyav"
    """reader of clips; decord must be installed, and reads other frames of some encodings
    (docs/operations.md)"""
    max_video_bytes: PositiveInt = 500_000_000
    """maximum size of an encoded clip"""
    max_video_seconds: PositiveFloat = 3600.0
    """maximum duration of a clip"""
    max_video_frames: PositiveInt = 200_000
    """maximum number of frames of a clip"""
    max_frames: PositiveInt = 8
    """maximum number of frames that select_frames returns"""
    max_track_frames: int = Field(300, ge=2)
    """maximum number of frames that track_object follows"""
    segmenter: str = "mobilenet"
    """`mobilenet` (a small packaged network), or a SAM or SAM 2 checkpoint for transformers: a folder, or
    owner/name[@revision] on the hub"""
    detector: str | None = None
    """folder or hub name of an OWL-ViT, OWLv2 or Grounding DINO checkpoint for transformers, which `find`
    needs"""
    searcher: str | None = None
    """folder or hub name of a CLIP or SigLIP checkpoint for transformers, with which `search_clip` searches by
    words"""

    @property
    def has_tools(self) -> bool:
        """Whether a question may offer operations or the actions of an environment."""
        return bool(self.operations or self.environments)
