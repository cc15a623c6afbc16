"""Configuration of supervised fine-tuning: length, token weights, validation, and the curriculum of
levels.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from pixelis.config.base import Section, Share


class PartWeightsConfig(Section):
    """Weight of a token in the loss by the part of its turn; 0 excludes the part."""

    think: NonNegativeFloat = 1.0
    """tokens of thoughts"""
    call: NonNegativeFloat = 1.0
    """tokens of calls, including the name of the operation"""
    arguments: NonNegativeFloat = 1.0
    """tokens of the arguments of calls"""
    answer: NonNegativeFloat = 1.0
    """tokens of answers"""

    @property
    def equal(self) -> bool:
        return self.think == self.call == self.arguments == self.answer == 1

    @model_validator(mode="after")
    def _positive(self) -> PartWeightsConfig:
        if not (self.think or self.call or self.arguments or self.answer):
            raise ValueError("all weights are 0")
        return self


class StageConfig(Section):
    """Shares of simple, medium and hard demonstrations in a batch, and the conditions that end the stage
    early.
    """

    name: str
    mixture: tuple[Share, Share, Share]
    """shares of simple, medium and hard demonstrations; they sum to 1"""
    max_steps: NonNegativeInt = 0
    """maximum number of steps of the stage; 0: no limit"""
    accuracy: float | None = 0.7
    """together with `loss`: held-out accuracy that ends the stage immediately"""
    loss: float | None = 2.0
    """together with `accuracy`: maximum held-out loss that ends the stage immediately"""

    @model_validator(mode="after")
    def _sums_to_one(self) -> StageConfig:
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
    """Conditions for the next stage and for a roll-back. Evaluations are those of ``sft.evaluate_every``."""

    enabled: bool = False
    """train in stages of increasing difficulty; false: use all levels from the start"""
    stages: list[StageConfig] = Field(list(STAGES), min_length=1)
    """stages in order"""
    interval: PositiveInt = 500
    """steps between checks for the next stage; doubles with each roll-back"""
    threshold: float = 0.6
    """minimum mean performance of the last three evaluations for the next stage"""
    patience: PositiveInt = 2
    """consecutive successful checks before the next stage starts"""
    cooldown: NonNegativeInt = 3
    """evaluations after the start of a stage before the next check"""
    drop: NonNegativeFloat = 0.05
    """drop of performance in a new stage that causes a roll-back"""
    wait: NonNegativeInt = 1000
    """steps without a check after a roll-back"""


class SftConfig(Section):
    steps: PositiveInt = 150
    """optimizer steps"""
    epochs: NonNegativeFloat = 0.0
    """epochs over the demonstrations, instead of `steps`; 0: use `steps`"""
    batch: PositiveInt = 16
    """demonstrations per step"""
    share: float = Field(1.0, gt=0, le=1)
    """share of the demonstrations to train on; a smaller share is a subset of a larger one"""
    kinds: list[Literal["golden", "self_correction"]] = Field(["golden", "self_correction"], min_length=1)
    """kinds of demonstrations to train on; others are left out and counted"""
    weights: PartWeightsConfig = PartWeightsConfig()
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """share of the target probability spread over the vocabulary"""
    validation: str = "cards:?split=validation"
    """held-out demonstrations for the validation loss"""
    validation_size: PositiveInt = 64
    """number of held-out demonstrations"""
    evaluate_every: NonNegativeInt = 0
    """steps between evaluations; 0: none"""
    evaluate_episodes: NonNegativeInt = 0
    """questions of data.evaluate, or of each of evaluate.sets, answered with full episodes in each
    evaluation; 0: none"""
    curriculum: SftCurriculumConfig = SftCurriculumConfig()

    @model_validator(mode="after")
    def _evaluated(self) -> SftConfig:
        if self.curriculum.enabled and not self.evaluate_every:
            raise ValueError("curriculum.enabled needs evaluations: set evaluate_every")
        return self
