"""Configuration of evaluations."""

from __future__ import annotations

from pydantic import Field

from pixelis.config.base import Section
from pixelis.config.engine import SamplingConfig


class EvaluateConfig(Section):
    questions: int = Field(500, ge=1, description="held-out questions")
    sampling: SamplingConfig = Field(SamplingConfig(temperature=0.0), description="how answers are drawn")
    operations: bool = Field(True, description="false: the direct arm, answers without any operation")
    trajectories: int = Field(12, ge=0, description="episodes kept with pictures in the report")
