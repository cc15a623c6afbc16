"""Configuration of refinement: rules, filters, gates, and the recipes of the resulting sets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pixelis.config.base import Section

Share = dict[str, float]
GROUPS = ("geometric", "ocr", "spatio_temporal", "zoom", "select", "vqa")
KINDS = ("golden", "trap", "self_correction")
PRIORITIES = ("uncertain", "high_reward", "self_correction", "diverse")


def _check_shares(what: str, name: str, shares: Share, names: tuple[str, ...]) -> None:
    """ValueError for shares that do not add up to 1 or of a name that does not exist."""
    if any(value < 0 for value in shares.values()) or not 0.99 <= sum(shares.values()) <= 1.01:
        raise ValueError(f"the shares of {what} add up to {sum(shares.values()):g}, not 1")
    if unknown := sorted(set(shares) - set(names)):
        raise ValueError(f"no {name} `{unknown[0]}` ({', '.join(names[:-1])} or {names[-1]})")


class QualityConfig(Section):
    length: tuple[int, int] = Field((2, 20), description="fewest and most actions (thoughts and operations)")
    question: tuple[int, int] = Field((10, 500), description="fewest and most characters of a question")
    provenance: bool = Field(True, description="drop demonstrations that do not say where they come from")
    least: float = Field(0.7, ge=0, le=1, description="least quality of what is kept")
    levels: dict[str, float] = Field({}, description="least quality by level; the published curriculum has simple .8, medium .6")
    judge: bool = Field(False, description="let the model of rewards.judge score 1..5 too")
    judge_least: float = Field(4.0, ge=1, le=5, description="least score of the judge")
    judge_temperature: float = Field(0.7, ge=0, description="temperature of the judge's first try")
    judge_calls_per_min: float = Field(60.0, gt=0, description="most requests to the judge in a minute")
    judge_repeats: float = Field(0.01, ge=0, le=1, description="share of the demonstrations that the judge scores three times")
    judge_std: float = Field(1.0, ge=0, description="standard deviation of three scores above which the judge is distrusted")


class DuplicatesConfig(Section):
    exact: bool = Field(True, description="drop demonstrations with the content of another")
    near: float = Field(0.95, ge=0, le=1, description="similarity of texts from which on two are one, pictures alike; 0: never")
    pictures: Literal["bytes", "look"] = Field("look", description="alike: the same bytes, or the same look (perceptual hash)")
    bits: int = Field(3, ge=0, le=3, description="look: most different bits of 64")


class HoldoutConfig(Section):
    sources: list[str] = Field([], description="evaluation questions that must not be in the set (text and pictures)")
    match: Literal["question", "picture"] = Field("question", description="what a hit is: text and pictures, or a picture alone")
    drop: bool = Field(False, description="drop hits; else a hit ends the job")


class PassRateConfig(Section):
    episodes: int = Field(0, ge=0, description="episodes of the policy for each question; 0: no filter by pass rate")
    low: float = Field(0.125, ge=0, le=1, description="least pass rate of a question to keep (inclusive)")
    high: float = Field(0.875, ge=0, le=1, description="largest pass rate (inclusive)")
    utility: bool = Field(False, description="also without operations: keep questions where looking pays")
    margin: float = Field(0.25, ge=0, le=1, description="utility: least pass rate with operations minus that without")
    without: float = Field(0.5, ge=0, le=1, description="utility: largest pass rate without operations")
    temperature: float = Field(1.0, ge=0, description="of the episodes")
    apply_to: Literal["rft", "all"] = Field("rft", description="filter the questions of rft only, or every set")

    @model_validator(mode="after")
    def _ordered(self) -> PassRateConfig:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        if self.utility and not self.episodes:
            raise ValueError("utility needs episodes")
        return self


class GatesConfig(Section):
    imbalance: float = Field(3.0, ge=1, description="largest task (and level) over the smallest")
    per_task: int = Field(100, ge=0, description="fewest demonstrations of a task")
    total: int = Field(1000, ge=0, description="fewest demonstrations")
    critical: int = Field(50, ge=0, description="fewest of each trap and of self-corrections")
    corrupted: float = Field(0.01, ge=0, le=1, description="largest share of rows that cannot be used")
    level_share: float = Field(0.25, ge=0, le=1, description="least share of each level")
    level_tasks: int = Field(3, ge=0, description="fewest tasks in each level")
    replay: float = Field(0.0, ge=0, le=1, description="share of the demonstrations that is executed again and compared")


class RecipeConfig(Section):
    size: int = Field(60_000, ge=1, description="most demonstrations")
    tasks: Share = Field({}, description="share by group of tasks: geometric, ocr, spatio_temporal, zoom, select, vqa")
    kinds: Share = Field({}, description="share by kind: golden, trap, self_correction; sft never gets a trap")
    length: tuple[int, int] = Field((2, 15), description="fewest and most actions")
    operations: int = Field(1, ge=0, description="fewest operations")
    hard_negative: float = Field(1.5, gt=0, description="weight of wrong answers (outcome negatives)")
    trap: float = Field(1.5, gt=0, description="weight of perceptual and logical traps")
    self_correction: float = Field(1.2, gt=0, description="weight of self-corrections")
    diversity: float = Field(0.0, ge=0, description="added weight for the share of different operations")

    @model_validator(mode="after")
    def _shares(self) -> RecipeConfig:
        for what, name, shares, names in (("tasks", "group of tasks", self.tasks, GROUPS), ("kinds", "kind", self.kinds, KINDS)):
            if shares:
                _check_shares(what, name, shares, names)
        return self


class OnlineConfig(Section):
    source: str = Field("", description="JSON-lines file of experiences to choose from; empty: none")
    size: int = Field(10_000, ge=1, description="most experiences")
    shares: Share = Field(
        {"uncertain": 0.4, "high_reward": 0.3, "self_correction": 0.2, "diverse": 0.1}, description="share by priority"
    )
    max_age_days: float = Field(90.0, gt=0, description="oldest experience")
    least_confidence: float = Field(0.3, ge=0, le=1, description="least confidence of a verdict; corrections are always kept")
    uncertain: float = Field(0.7, ge=0, le=1, description="confidence below which a verdict is uncertain")

    @model_validator(mode="after")
    def _shares(self) -> OnlineConfig:
        _check_shares("online experiences", "priority", self.shares, PRIORITIES)
        return self


class SftRecipeConfig(RecipeConfig):
    tasks: Share = Field(
        {"geometric": 0.25, "ocr": 0.20, "spatio_temporal": 0.20, "zoom": 0.10, "select": 0.10, "vqa": 0.15},
        description="share by group of tasks; empty: as they come",
    )
    kinds: Share = Field(
        {"golden": 0.6, "trap": 0.2, "self_correction": 0.2},
        description="share by kind; empty: as they come. A trap's share goes to the others: sft never gets one",
    )
    validation: float = Field(0.05, ge=0, lt=1, description="share, by picture, that is written to sft_validation.jsonl instead")


class RftRecipeConfig(RecipeConfig):
    size: int = Field(40_000, ge=1, description="most demonstrations whose questions are taken")
    tasks: Share = Field(
        {"geometric": 0.30, "ocr": 0.15, "spatio_temporal": 0.25, "zoom": 0.10, "select": 0.10, "vqa": 0.10},
        description="share by group of tasks; empty: as they come",
    )
    kinds: Share = Field({"golden": 0.5, "trap": 0.25, "self_correction": 0.25}, description="share by kind; empty: as they come")
    hard_negative: float = Field(2.0, gt=0, description="weight of wrong answers (outcome negatives)")
    trap: float = Field(3.0, gt=0, description="weight of perceptual and logical traps")
    diversity: float = Field(0.1, ge=0, description="added weight for the share of different operations")


class RefinementConfig(Section):
    count: int = Field(3000, ge=1, description="demonstrations that a `cards:` source makes; files are read whole")
    observe: bool = Field(True, description="execute calls that come without an observation")
    quality: QualityConfig = QualityConfig()
    duplicates: DuplicatesConfig = DuplicatesConfig()
    holdout: HoldoutConfig = HoldoutConfig()
    pass_rate: PassRateConfig = PassRateConfig()
    gates: GatesConfig = GatesConfig()
    sft: SftRecipeConfig = SftRecipeConfig()
    rft: RftRecipeConfig = RftRecipeConfig()
    online: OnlineConfig = OnlineConfig()
    examples: int = Field(12, ge=0, description="demonstrations shown with pictures on the card")
