"""Configuration of the search for LoRA ranks in a full fine-tune's changes."""

from __future__ import annotations

from pydantic import Field, model_validator

from pixelis.config.base import Section


class RanksConfig(Section):
    tuned: str | None = Field(
        None, description="policy.model after full fine-tuning: a checkpoint of a run with policy.full, or a Hugging Face folder"
    )
    energy: float = Field(0.9, gt=0, le=1, description="share of a change's squared norm that a layer's rank keeps")
    smallest: int = Field(4, ge=1, description="least rank of a layer")
    largest: int = Field(128, ge=1, description="largest rank of a layer")
    smoothing: float = Field(0.8, ge=0, le=1, description="weight of the mean over layers of the same name in a layer's rank")
    unchanged: float = Field(1e-8, ge=0, description="a layer whose largest change is no more than this gets no adapter")
    components: int = Field(512, ge=1, description="singular values that are computed of a large layer")
    oversampling: int = Field(10, ge=0, description="further ones that the randomised decomposition takes to find these")
    exact: int = Field(100, ge=0, description="layers with a side up to this are decomposed exactly")

    @model_validator(mode="after")
    def _ordered(self) -> RanksConfig:
        if self.smallest > self.largest:
            raise ValueError(f"smallest {self.smallest} is above largest {self.largest}")
        return self
