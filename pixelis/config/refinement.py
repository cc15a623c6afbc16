"""Configuration of refinement: rules, filters, gates, and the recipes of the resulting sets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from pixelis.config.base import Section

Share = dict[str, float]
GROUPS = ("geometric", "ocr", "spatio_temporal", "zoom", "select", "vqa")
KINDS = ("golden", "trap", "self_correction")


class QualityConfig(Section):
    length: tuple[int, int] = Field(
        (2, 15), description="minimum and maximum number of actions (thoughts and operations)"
    )
    question: tuple[int, int] = Field(
        (10, 500), description="minimum and maximum number of characters of a question"
    )
    provenance: bool = Field(True, description="drop demonstrations without a source")
    min_score: float = Field(0.7, ge=0, le=1, description="minimum quality of a demonstration")
    levels: dict[str, float] = Field(
        {}, description="minimum quality by level (published curriculum: simple 0.8, medium 0.6)"
    )
    judge: bool = Field(False, description="also score demonstrations 1..5 with the model of rewards.judge")


class DuplicatesConfig(Section):
    near: float = Field(
        0.95,
        ge=0,
        le=1,
        description="minimum similarity of the texts of near duplicates with matching pictures; 0: keep them",
    )
    pictures: Literal["bytes", "look"] = Field(
        "look", description="pictures match when their bytes or their perceptual hashes (look) are equal"
    )


class HoldoutConfig(Section):
    sources: list[str] = Field([], description="evaluation questions that must not be in the set")
    match: Literal["question", "picture"] = Field(
        "question",
        description="a match is the same text with the same pictures (question), or the same picture",
    )
    drop: bool = Field(False, description="drop matches; otherwise a match ends the job")


class PassRateConfig(Section):
    episodes: int = Field(
        0, ge=0, description="episodes of the policy per question; 0: no filter by pass rate"
    )
    low: float = Field(0.125, ge=0, le=1, description="minimum pass rate of a question (inclusive)")
    high: float = Field(0.875, ge=0, le=1, description="maximum pass rate of a question (inclusive)")
    utility: bool = Field(
        False,
        description=(
            "also run episodes without operations, and keep only questions that benefit from operations"
        ),
    )

    @model_validator(mode="after")
    def _ordered(self) -> PassRateConfig:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        if self.utility and not self.episodes:
            raise ValueError("utility needs episodes")
        return self


class GatesConfig(Section):
    imbalance: float = Field(
        3.0, ge=1, description="maximum ratio between the largest and the smallest task or level"
    )
    per_task: int = Field(100, ge=0, description="minimum number of demonstrations of a task")
    sizes: bool = Field(
        True,
        description="require 1,000 demonstrations, 50 of each critical kind, and three tasks and 25 % in each level",
    )
    corrupted: float = Field(0.01, ge=0, le=1, description="maximum share of unusable rows")
    replay: float = Field(
        0.0, ge=0, le=1, description="share of the demonstrations that are executed again and compared"
    )


class RecipeConfig(Section):
    size: int = Field(60_000, ge=1, description="maximum number of demonstrations")
    tasks: Share = Field(
        {}, description="share by group of tasks: geometric, ocr, spatio_temporal, zoom, select, vqa"
    )
    kinds: Share = Field({}, description="share by kind: golden, trap, self_correction; sft never uses traps")

    @field_validator("tasks", "kinds")
    @classmethod
    def _shares(cls, shares: Share, info) -> Share:
        names = GROUPS if info.field_name == "tasks" else KINDS
        if unknown := sorted(set(shares) - set(names)):
            raise ValueError(f"unknown share `{unknown[0]}` ({', '.join(names[:-1])} or {names[-1]})")
        if any(value < 0 for value in shares.values()) or (
            shares and not 0.99 <= sum(shares.values()) <= 1.01
        ):
            raise ValueError(f"the shares add up to {sum(shares.values()):g}, not 1")
        return shares


class SftRecipeConfig(RecipeConfig):
    tasks: Share = Field(
        {"geometric": 0.25, "ocr": 0.20, "spatio_temporal": 0.20, "zoom": 0.10, "select": 0.10, "vqa": 0.15},
        description="share by group of tasks; empty: as available",
    )
    kinds: Share = Field(
        {"golden": 0.6, "trap": 0.2, "self_correction": 0.2},
        description=(
            "share by kind; empty: as available. sft never uses traps, so their share goes to the other kinds"
        ),
    )
    validation: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="share of the pictures whose demonstrations go to sft_validation.jsonl instead",
    )


class RftRecipeConfig(RecipeConfig):
    size: int = Field(40_000, ge=1, description="maximum number of demonstrations to take questions from")
    tasks: Share = Field(
        {"geometric": 0.30, "ocr": 0.15, "spatio_temporal": 0.25, "zoom": 0.10, "select": 0.10, "vqa": 0.10},
        description="share by group of tasks; empty: as available",
    )
    kinds: Share = Field(
        {"golden": 0.5, "trap": 0.25, "self_correction": 0.25},
        description="share by kind; empty: as available",
    )


class RefinementConfig(Section):
    workers: int = Field(
        0,
        ge=0,
        description=(
            "processes of the cluster that check rows, execute calls and hash pictures; 0: the job "
            "alone, no cluster"
        ),
    )
    quality: QualityConfig = QualityConfig()
    duplicates: DuplicatesConfig = DuplicatesConfig()
    holdout: HoldoutConfig = HoldoutConfig()
    pass_rate: PassRateConfig = PassRateConfig()
    gates: GatesConfig = GatesConfig()
    sft: SftRecipeConfig = SftRecipeConfig()
    rft: RftRecipeConfig = RftRecipeConfig()
