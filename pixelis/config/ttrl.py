"""Configuration of test-time reinforcement learning: evaluation and early stopping."""

from __future__ import annotations

from pydantic import Field

from pixelis.config.base import Section


class TtrlConfig(Section):
    samples: int = Field(16, ge=1, description="episodes of each question before and after: pass@1 is their mean, and they vote")
    patience: int = Field(
        0, ge=0, description="the run ends when the mean majority share of so many steps is no higher than that of as many before"
    )
    min_gain: float = Field(0.005, ge=0, le=1, description="least rise of that share that lets the run go on")
