"""Configuration of the pixel operations and the limits they run under."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pixelis.config.base import Section


class ToolboxConfig(Section):
    operations: list[str] = Field(
        ["zoom_in", "segment_object_at", "get_properties", "read_text", "track_object", "select_frames"],
        description="pixel operations that the policy may call; your own as `package.module:Class`",
    )
    environments: list[str] = Field(
        [],
        description="environments that a question may name (`environment`, `env_name` of a DeepEyes row), as "
        "`package.module:Class` or `path.py:Class`; their episodes live in the toolbox and share its "
        "memory_bytes",
    )
    workers: int = Field(1, ge=1, description="toolbox actors per generator")
    cpus: float = Field(0.25, ge=0, description="CPUs that each toolbox reserves")
    gpus: float = Field(
        0, ge=0, description="GPUs that each toolbox reserves, for a SAM segmenter; 0: it runs on the CPU"
    )
    timeout_s: float = Field(30.0, gt=0, description="timeout in seconds of an operation")
    memory_bytes: int = Field(
        2_000_000_000, ge=100_000_000, description="memory that an operation may use beyond the idle toolbox"
    )
    cache_bytes: int = Field(
        256_000_000,
        ge=0,
        description="size of each generator's cache for repeated calls; a quarter more for pictures",
    )
    max_image_bytes: int = Field(20_000_000, ge=1, description="maximum size of an encoded image")
    max_image_pixels: int = Field(
        50_000_000, ge=1, description="maximum number of pixels of an image, checked before decoding"
    )
    video_backend: Literal["pyav", "decord"] = Field(
        "pyav",
        description=(
            "reader of clips; decord must be installed, and reads other frames of some encodings "
            "(docs/operations.md)"
        ),
    )
    max_video_bytes: int = Field(500_000_000, ge=1, description="maximum size of an encoded clip")
    max_video_seconds: float = Field(3600.0, gt=0, description="maximum duration of a clip")
    max_video_frames: int = Field(200_000, ge=1, description="maximum number of frames of a clip")
    max_frames: int = Field(8, ge=1, description="maximum number of frames that select_frames returns")
    max_track_frames: int = Field(300, ge=2, description="maximum number of frames that track_object follows")
    segmenter: str = Field(
        "mobilenet",
        description="`mobilenet` (a small packaged network), or a folder with a SAM or SAM 2 checkpoint for "
        "transformers",
    )
    detector: str | None = Field(
        None,
        description=(
            "folder of an OWL-ViT, OWLv2 or Grounding DINO checkpoint for transformers, which `find` needs"
        ),
    )
    searcher: str | None = Field(
        None,
        description=(
            "folder of a CLIP or SigLIP checkpoint for transformers, with which `search_clip` "
            "searches by words"
        ),
    )

    @property
    def has_tools(self) -> bool:
        """Whether a question may offer operations or the actions of an environment."""
        return bool(self.operations or self.environments)
