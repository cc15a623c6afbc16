"""Configuration of the search for LoRA ranks in a full fine-tune's changes."""

from __future__ import annotations

from pydantic import Field, model_validator

from pixelis.config.base import Section


class RanksConfig(Section):
    tuned: str | None = Field(
        None,
        description="policy.model after full fine-tuning: a run with policy.full, one of its checkpoints, "
        "or a Hugging Face "
        "folder",
    )
    energy: float = Field(
        0.9, gt=0, le=1, description="share of the squared norm of a layer's change that its rank retains"
    )
    smallest: int = Field(4, ge=1, description="minimum rank of a layer")
    largest: int = Field(128, ge=1, description="maximum rank of a layer")
    smoothing: float = Field(
        0.8, ge=0, le=1, description="weight of the mean over layers of the same type in the rank of a layer"
    )

    @model_validator(mode="after")
    def _ordered(self) -> RanksConfig:
        if self.smallest > self.largest:
            raise ValueError(f"smallest {self.smallest} is above largest {self.largest}")
        return self
