"""Configuration of the dialogue: dialect, pixel budgets, turn and context limits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from pixelis.config.base import Section


class PixelRangeConfig(Section):
    min_pixels: PositiveInt = 4096
    """smallest area of a view in pixels"""
    max_pixels: PositiveInt = 4096
    """largest area of a view in pixels"""

    @model_validator(mode="after")
    def _ordered(self) -> PixelRangeConfig:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        return self


class DialogueConfig(Section):
    dialect: Literal[
        "qwen",
        "qwen_xml",
        "qwen_zoom",
        "qwen_zoom_xml",
        "mini_o3",
        "pixel_reasoner",
        "deepeyes",
        "plain",
        "dapo",
    ] = "qwen"
    """format of calls and answers, which limits the operations that are offered: qwen (calls in JSON) and
    qwen_xml (the native form of Qwen3.5) all of toolbox.operations, qwen_zoom and qwen_zoom_xml (the native zoom of
    Qwen3-VL and of Qwen3.5) and mini_o3 zoom_in, pixel_reasoner zoom_in and select_frames, deepeyes zoom_in and rotate,
    plain and dapo none"""
    system: Literal["auto", "row", "template", "none"] = "auto"
    """auto: a system turn with the tool schemas, or in a dialect without one that of the model's chat
    template, except for the embedded model; row: the system message of the question's own row where it has
    one, without further instructions, and else as auto; template: that of the model's chat template, without
    further instructions; none: no system turn and no instructions"""
    thinking: bool = True
    """policy turns begin with a thought, for models whose chat template has a switch for it (Qwen3.5)"""
    coordinates: Literal["auto", "thousand", "pixels"] = "auto"
    """coordinates that the model writes: 0..1000 (Qwen3-VL), pixels of the view (Qwen2.5-VL), auto: by
    architecture"""
    clamp: bool | None = None
    """boxes partly outside an image are cut at its border (true) or refused (false); null: as in the
    dialect's system, cut in qwen_zoom, qwen_zoom_xml, pixel_reasoner and deepeyes"""
    max_calls: PositiveInt = 1
    """calls of a turn that are executed, in order; above 1 with the dialects qwen and qwen_xml, which refuse more,
    and qwen_zoom, qwen_zoom_xml and deepeyes, which ignore them; 1: the one that counts in the dialect's system"""
    input: PixelRangeConfig = PixelRangeConfig()
    """pixel budget of a question's picture"""
    crop: PixelRangeConfig = PixelRangeConfig()
    """pixel budget of an observation's picture"""
    frame: PixelRangeConfig = PixelRangeConfig()
    """pixel budget of a frame of a clip"""
    frames: PositiveInt = 8
    """evenly spread frames of a clip in the prompt"""
    max_turns: PositiveInt = 3
    """maximum number of policy turns in training"""
    max_turns_test: PositiveInt = 3
    """maximum number of policy turns in evaluation and serving"""
    max_turn_tokens: PositiveInt = 32
    """maximum number of tokens of a policy turn"""
    max_context: int = Field(512, ge=16)
    """maximum number of tokens of an episode"""
    max_images: PositiveInt = 8
    """maximum number of images of an episode"""

    @property
    def instructs(self) -> bool:
        """Whether prompts explain the dialect, unless a question's row has a system message for `row`."""
        return self.system in ("auto", "row")

    def with_max_pixels(self, max_pixels: int) -> DialogueConfig:
        """These settings with another budget for the question's picture and for crops."""
        budgets = {
            role: PixelRangeConfig(min_pixels=min(budget.min_pixels, max_pixels), max_pixels=max_pixels)
            for role, budget in {"input": self.input, "crop": self.crop}.items()
        }
        return self.model_copy(update=budgets)

    @model_validator(mode="after")
    def _possible_in_the_dialect(self) -> DialogueConfig:
        if self.coordinates != "auto" and self.dialect not in ("qwen", "qwen_xml"):
            raise ValueError(f"dialogue.coordinates must be auto: the dialect {self.dialect} has its own")
        several = ("qwen", "qwen_xml", "qwen_zoom", "qwen_zoom_xml", "deepeyes")
        if self.max_calls > 1 and self.dialect not in several:
            raise ValueError(
                f"dialogue.max_calls must be 1: a turn of the dialect {self.dialect} has one call"
            )
        return self
