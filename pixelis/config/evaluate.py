"""Configuration of evaluations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pixelis.config.base import Section
from pixelis.config.engine import SamplingConfig

System = Literal["pixel_reasoner", "r1_v", "deepeyes", "mini_o3"]


class EvaluateConfig(Section):
    questions: int = Field(500, ge=1, description="number of held-out questions")
    sampling: SamplingConfig = Field(SamplingConfig(temperature=0.0), description="sampling of the answers")
    samples: int = Field(1, ge=1, description="episodes of a question; with more than 1 also avg@k, pass@k and maj@k")
    sets: dict[str, str] = Field(
        {},
        description="several sources by name instead of data.evaluate, such as {id: ..., ood: ...}, and their mean; also the "
        "evaluations during sft and rft, whose best checkpoint is that of the best mean",
    )
    max_pixels: list[Annotated[int, Field(ge=1)]] = Field(
        [],
        description="evaluate once with each of these budgets instead of dialogue.input.max_pixels and dialogue.crop.max_pixels",
    )
    images: bool = Field(False, description="save every picture that the policy saw as a file, named in the trajectories")
    outputs: list[System] = Field([], description="write the results also as the evaluation of these systems does")
    answers: str | None = Field(
        None, description="file of another model's answers (JSON, JSON lines, Parquet; column `pred` or `model_output`) to score"
    )
    operations: bool = Field(True, description="offer the pixel operations; false: direct answers")
    trajectories: int = Field(12, ge=0, description="episodes shown with pictures in the report")
