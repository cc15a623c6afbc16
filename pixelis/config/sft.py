"""Configuration of supervised fine-tuning: length, token weights, validation, and the curriculum of levels."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pixelis.config.base import Section

Share = Annotated[float, Field(ge=0, le=1)]


class PartWeightsConfig(Section):
    """What a token counts in the loss, by the part of a turn it belongs to; 0 leaves the part out."""

    think: float = Field(1.0, ge=0, description="tokens of thoughts")
    call: float = Field(1.0, ge=0, description="tokens that call an operation, its name included")
    arguments: float = Field(1.0, ge=0, description="tokens of an operation's arguments")
    answer: float = Field(1.0, ge=0, description="tokens of answers")

    @property
    def equal(self) -> bool:
        """Whether every token counts the same: 1."""
        return self.think == self.call == self.arguments == self.answer == 1

    @model_validator(mode="after")
    def _something(self) -> PartWeightsConfig:
        if not (self.think or self.call or self.arguments or self.answer):
            raise ValueError("all are 0: nothing would be learnt")
        return self


class StageConfig(Section):
    """Shares of simple, medium and hard demonstrations in a batch, and what ends the stage early."""

    name: str
    mixture: tuple[Share, Share, Share] = Field(description="simple, medium, hard; their sum is 1")
    max_steps: int = Field(0, ge=0, description="steps after which the next stage begins anyway; 0 is no limit")
    accuracy: float | None = Field(0.7, description="with `loss`: held-out accuracy that ends the stage at once")
    loss: float | None = Field(2.0, description="with `accuracy`: largest held-out loss at which it does")

    @model_validator(mode="after")
    def _whole(self) -> StageConfig:
        if not math.isclose(sum(self.mixture), 1, abs_tol=1e-6):
            raise ValueError(f"the mixture of stage {self.name} sums to {sum(self.mixture):g}, not 1")
        return self


STAGES = (
    StageConfig(name="simple", mixture=(1.0, 0.0, 0.0), max_steps=2000),
    StageConfig(name="simple_medium", mixture=(0.7, 0.3, 0.0), max_steps=2000),
    StageConfig(name="balanced", mixture=(0.4, 0.4, 0.2), max_steps=2000),
    StageConfig(name="medium_hard", mixture=(0.2, 0.4, 0.4), max_steps=2000),
    StageConfig(name="full", mixture=(0.2, 0.3, 0.5)),
)


class SftCurriculumConfig(Section):
    """When the next stage begins and when it is taken back. An evaluation is one of ``sft.evaluate_every``."""

    enabled: bool = Field(False, description="draw batches by stages; false: as the demonstrations come")
    stages: list[StageConfig] = Field(list(STAGES), min_length=1, description="the stages in order")
    interval: int = Field(500, ge=1, description="steps between two looks at whether to go on; grows with each roll-back")
    window: int = Field(3, ge=1, description="evaluations whose mean performance is looked at")
    threshold: float = Field(0.6, description="mean performance that is good enough to go on")
    patience: int = Field(2, ge=1, description="looks in a row that must find it good enough")
    cooldown: int = Field(3, ge=0, description="evaluations after a new stage before the next look")
    drop: float = Field(0.05, ge=0, description="loss of performance by a new stage that takes it back")
    wait: int = Field(1000, ge=0, description="steps after a roll-back without a look")
    backoff: float = Field(2.0, ge=1, description="factor on the interval with each roll-back")


class SftConfig(Section):
    steps: int = Field(150, ge=1, description="optimizer steps")
    epochs: float = Field(0.0, ge=0, description="passes through the demonstrations instead of `steps`; 0: `steps` counts")
    batch: int = Field(16, ge=1, description="demonstrations in a step")
    share: float = Field(1.0, gt=0, le=1, description="part of the demonstrations to learn from; a smaller one lies in a larger")
    kinds: list[Literal["golden", "self_correction"]] = Field(
        ["golden", "self_correction"],
        min_length=1,
        description="kinds that are learnt, right ones; others are left out and counted",
    )
    weights: PartWeightsConfig = PartWeightsConfig()
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="part of the target spread over the whole vocabulary")
    validation: str = Field("cards:?split=validation", description="held-out demonstrations, for the loss")
    validation_size: int = Field(64, ge=1, description="how many of them")
    evaluate_every: int = Field(0, ge=0, description="steps between evaluations; 0 is none")
    evaluate_episodes: int = Field(
        0, ge=0, description="questions of data.evaluate answered in each, operations executed; 0 is none"
    )
    curriculum: SftCurriculumConfig = SftCurriculumConfig()

    @model_validator(mode="after")
    def _measured(self) -> SftConfig:
        if self.curriculum.enabled and not self.evaluate_every:
            raise ValueError("curriculum.enabled needs evaluations to go by: set evaluate_every")
        return self
