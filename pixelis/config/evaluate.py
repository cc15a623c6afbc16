"""Configuration of evaluations."""

from __future__ import annotations

from pydantic import Field

from pixelis.config.base import Section
from pixelis.config.engine import SamplingConfig


class EvaluateConfig(Section):
    questions: int = Field(500, ge=1, description="number of held-out questions")
    sampling: SamplingConfig = Field(SamplingConfig(temperature=0.0), description="sampling of the answers")
    samples: int = Field(1, ge=1, description="episodes of a question; with more than 1 also avg@k, pass@k and maj@k")
    sets: dict[str, str] = Field(
        {},
        description="several sources by name instead of data.evaluate, such as {id: ..., ood: ...}, and their mean; also the "
        "evaluations during rft, whose best checkpoint is that of the best mean",
    )
    answers: str | None = Field(
        None, description="file of another model's answers (JSON, JSON lines, Parquet; column `pred` or `model_output`) to score"
    )
    operations: bool = Field(True, description="offer the pixel operations; false: direct answers")
    trajectories: int = Field(12, ge=0, description="episodes shown with pictures in the report")
