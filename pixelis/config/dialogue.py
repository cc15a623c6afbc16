"""Configuration of the dialogue: dialect, pixel budgets, turn and context limits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pixelis.config.base import Section


class PixelRangeConfig(Section):
    min_pixels: int = Field(4096, ge=1, description="smallest area of a view in pixels")
    max_pixels: int = Field(4096, ge=1, description="largest area of a view in pixels")

    @model_validator(mode="after")
    def _ordered(self) -> PixelRangeConfig:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        return self


class DialogueConfig(Section):
    dialect: Literal["qwen", "mini_o3", "pixel_reasoner", "deepeyes", "plain"] = Field(
        "qwen",
        description="wire format of calls and answers; of toolbox.operations those are offered that it has a form for: qwen all, "
        "mini_o3 zoom_in, pixel_reasoner zoom_in and select_frames, deepeyes zoom_in and one called rotate, plain none",
    )
    system: Literal["auto", "none"] = Field(
        "auto", description="auto: tool schemas in a system turn, none for the embedded model; none: never"
    )
    coordinates: Literal["auto", "thousand", "pixels"] = Field(
        "auto",
        description="boxes the model writes: 0..1000 (Qwen3-VL), absolute pixels of the view (Qwen2.5-VL), auto by architecture",
    )
    input: PixelRangeConfig = Field(PixelRangeConfig(), description="pixel budget of a question's picture")
    crop: PixelRangeConfig = Field(PixelRangeConfig(), description="pixel budget of an observation's picture")
    frame: PixelRangeConfig = Field(PixelRangeConfig(), description="pixel budget of a frame of a clip")
    frames: int = Field(8, ge=1, description="frames of a clip that the policy sees at first, evenly spread")
    max_turns: int = Field(3, ge=1, description="policy turns in training")
    max_turns_test: int = Field(3, ge=1, description="policy turns in evaluation and serving")
    max_turn_tokens: int = Field(32, ge=1, description="new tokens in one policy turn")
    max_context: int = Field(512, ge=16, description="tokens of a whole episode")
    max_images: int = Field(8, ge=1, description="images in a whole episode")

    @model_validator(mode="after")
    def _one_scale(self) -> DialogueConfig:
        if self.coordinates != "auto" and self.dialect != "qwen":
            raise ValueError(f"dialogue.coordinates must be auto: the dialect {self.dialect} has its own")
        return self
