"""Configuration of the search for LoRA ranks in a full fine-tune's changes."""

from __future__ import annotations

from pydantic import Field, PositiveInt, model_validator

from pixelis.config.base import Section, Share


class RanksConfig(Section):
    tuned: str | None = None
    """policy.model after full fine-tuning: a run with policy.full, one of its checkpoints, or a model as
    in policy.model"""
    energy: float = Field(0.9, gt=0, le=1)
    """share of the squared norm of a layer's change that its rank retains"""
    smallest: PositiveInt = 4
    """minimum rank of a layer"""
    largest: PositiveInt = 128
    """maximum rank of a layer"""
    smoothing: Share = 0.8
    """weight of the mean over layers of the same type in the rank of a layer"""

    @model_validator(mode="after")
    def _ordered(self) -> RanksConfig:
        if self.smallest > self.largest:
            raise ValueError(f"smallest {self.smallest} is above largest {self.largest}")
        return self
