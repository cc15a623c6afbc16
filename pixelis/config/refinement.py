"""Configuration of refinement: rules, filters, gates, and the recipes of the resulting sets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from pixelis.config.base import Section, Share

Shares = dict[str, float]
GROUPS = ("geometric", "ocr", "spatio_temporal", "zoom", "select", "vqa")
KINDS = ("golden", "trap", "self_correction")


class QualityConfig(Section):
    length: tuple[int, int] = (2, 15)
    """minimum and maximum number of actions (thoughts and operations)"""
    question: tuple[int, int] = (10, 500)
    """minimum and maximum number of characters of a question"""
    provenance: bool = True
    """drop demonstrations without a source"""
    min_score: Share = 0.7
    """minimum quality of a demonstration"""
    levels: dict[str, float] = Field({})
    """minimum quality by level (published curriculum: simple 0.8, medium 0.6)"""
    judge: bool = False
    """also score demonstrations 1..5 with the model of rewards.judge"""


class DuplicatesConfig(Section):
    near: Share = 0.95
    """minimum similarity of the texts of near duplicates with matching pictures; 0: keep them"""
    pictures: Literal["bytes", "look"] = "look"
    """pictures match when their bytes or their perceptual hashes (look) are equal"""


class HoldoutConfig(Section):
    sources: list[str] = Field([])
    """evaluation questions that must not be in the set"""
    match: Literal["question", "picture"] = "question"
    """a match is the same text with the same pictures (question), or the same picture"""
    drop: bool = False
    """drop matches; otherwise a match ends the job"""


class PassRateConfig(Section):
    episodes: NonNegativeInt = 0
    """episodes of the policy per question; 0: no filter by pass rate"""
    low: Share = 0.125
    """minimum pass rate of a question (inclusive)"""
    high: Share = 0.875
    """maximum pass rate of a question (inclusive)"""
    utility: bool = False
    """also run episodes without operations, and keep only questions that benefit from operations"""
    annotated: bool = False
    """utility of the question's annotated box: a crop of it is shown beside the pictures, in place of operations"""

    @model_validator(mode="after")
    def _ordered(self) -> PassRateConfig:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        if self.utility and not self.episodes:
            raise ValueError("utility needs episodes")
        if self.annotated and not self.utility:
            raise ValueError("annotated needs utility")
        return self


class GatesConfig(Section):
    imbalance: float = Field(3.0, ge=1)
    """maximum ratio between the largest and the smallest task or level"""
    per_task: NonNegativeInt = 100
    """minimum number of demonstrations of a task"""
    sizes: bool = True
    """also require 1,000 demonstrations, 50 of each critical kind, 25 % and three tasks in each level"""
    corrupted: Share = 0.01
    """maximum share of unusable rows"""
    replay: Share = 0.0
    """share of the demonstrations that are executed again and compared"""


class RecipeConfig(Section):
    size: PositiveInt = 60_000
    """maximum number of demonstrations"""
    tasks: Shares = Field({})
    """share by group of tasks: geometric, ocr, spatio_temporal, zoom, select, vqa"""
    kinds: Shares = Field({})
    """share by kind: golden, trap, self_correction; sft never uses traps"""

    @field_validator("tasks", "kinds")
    @classmethod
    def _shares(cls, shares: Shares, info) -> Shares:
        names = GROUPS if info.field_name == "tasks" else KINDS
        if unknown := sorted(set(shares) - set(names)):
            raise ValueError(f"unknown share `{unknown[0]}` ({', '.join(names[:-1])} or {names[-1]})")
        if any(value < 0 for value in shares.values()) or (
            shares and not 0.99 <= sum(shares.values()) <= 1.01
        ):
            raise ValueError(f"the shares add up to {sum(shares.values()):g}, not 1")
        return shares


class SftRecipeConfig(RecipeConfig):
    tasks: Shares = Field(
        {"geometric": 0.25, "ocr": 0.20, "spatio_temporal": 0.20, "zoom": 0.10, "select": 0.10, "vqa": 0.15}
    )
    """share by group of tasks; empty: as available"""
    kinds: Shares = Field({"golden": 0.6, "trap": 0.2, "self_correction": 0.2})
    """share by kind; empty: as available. sft never uses traps, so their share goes to the other kinds"""
    validation: float = Field(0.05, ge=0, lt=1)
    """share of the pictures whose demonstrations go to sft_validation.jsonl instead"""


class RftRecipeConfig(RecipeConfig):
    size: PositiveInt = 40_000
    """maximum number of demonstrations to take questions from"""
    tasks: Shares = Field(
        {"geometric": 0.30, "ocr": 0.15, "spatio_temporal": 0.25, "zoom": 0.10, "select": 0.10, "vqa": 0.10}
    )
    """share by group of tasks; empty: as available"""
    kinds: Shares = Field({"golden": 0.5, "trap": 0.25, "self_correction": 0.25})
    """share by kind; empty: as available"""


class RefinementConfig(Section):
    workers: NonNegativeInt = 0
    """processes of a cluster that check rows, execute calls and hash pictures; 0: the job alone"""
    quality: QualityConfig = QualityConfig()
    duplicates: DuplicatesConfig = DuplicatesConfig()
    holdout: HoldoutConfig = HoldoutConfig()
    pass_rate: PassRateConfig = PassRateConfig()
    gates: GatesConfig = GatesConfig()
    sft: SftRecipeConfig = SftRecipeConfig()
    rft: RftRecipeConfig = RftRecipeConfig()
