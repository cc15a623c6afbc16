"""Configuration of synthesis: sources, tasks with target counts, proportions, and language models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pixelis.config.base import Section
from pixelis.config.llm import LlmConfig


class DatasourceConfig(Section):
    path: str
    """questions with annotations: `packaged:NAME?split=train`, `coco:/data/coco?split=...`, a file"""
    rows: NonNegativeInt = 0
    """use only the first N rows; 0: all"""


class SynthesisTaskConfig(Section):
    enabled: bool = True
    """false: skip this task"""
    target_sample_count: PositiveInt = 100
    """number of samples, including traps and self-corrections"""
    source_datasets: dict[str, float] = Field(min_length=1)
    """weight of each datasource; a list of names gives each the weight 1"""

    @model_validator(mode="before")
    @classmethod
    def _names(cls, values):
        sources = values.get("source_datasets") if isinstance(values, dict) else None
        if isinstance(sources, list):
            values = {**values, "source_datasets": dict.fromkeys(sources, 1.0)}
        return values

    @model_validator(mode="after")
    def _positive(self) -> SynthesisTaskConfig:
        if any(weight <= 0 for weight in self.source_datasets.values()):
            raise ValueError("the weights of source_datasets must be above 0")
        return self


class ProportionsConfig(Section):
    golden: NonNegativeFloat = 0.6
    """share of correct samples"""
    trap: NonNegativeFloat = 0.2
    """share of deliberately wrong samples"""
    self_correction: NonNegativeFloat = 0.2
    """share of samples that make a mistake and correct it"""


class TrapSplitConfig(Section):
    outcome_negative: NonNegativeFloat = 0.5
    """share of traps in which only the answer is wrong"""
    trap_perceptual: NonNegativeFloat = 0.25
    """share of traps that look at a similar but wrong place"""
    trap_logical: NonNegativeFloat = 0.25
    """share of traps with an invalid last inference"""


class ChatConfig(LlmConfig):
    api_key_env: str = "PIXELIS_SYNTHESIS_API_KEY"
    """environment variable with the API key; empty: no key is sent"""
    temperature: float = Field(0.7, ge=0, le=2)
    """sampling temperature of the first request"""
    max_tokens: PositiveInt = 1024
    """maximum number of tokens of a reply"""
    calls_per_minute: PositiveFloat = 60.0
    """requests per minute and worker"""


class WriterConfig(ChatConfig):
    on_reject: Literal["template", "drop"] = "template"
    """thoughts that fail their checks in all tries: use those of the template, or drop the sample"""


class TeacherConfig(ChatConfig):
    """The model whose episodes or replies become samples."""

    plays: Literal["turns", "gateway"] = "turns"
    """imitation: turns: a model imitates demonstrations turn by turn; gateway: a policy served by `pixelis
    serve` answers"""
    demonstrations: str = ""
    """imitation: demonstrations to imitate (JSON lines)"""
    shots: PositiveInt = 6
    """imitation: number of demonstrations in the prompt"""
    max_turns: PositiveInt = 6
    """imitation: maximum number of turns of an episode, including the answer"""
    responses: str = "responses"
    """distillation: key in the meta of a row that has its replies; for rows without it the model is asked"""


class SynthesisConfig(Section):
    method: Literal["templates", "imitation", "distillation"] = "templates"
    """origin of correct samples: annotations (templates), episodes of a model (imitation), or replies of a
    model (distillation)"""
    datasources: dict[str, DatasourceConfig] = Field({})
    """data sources by name"""
    tasks: dict[str, SynthesisTaskConfig] = Field({})
    """tasks by name, with target counts and weighted sources"""
    proportions: ProportionsConfig = ProportionsConfig()
    traps: TrapSplitConfig = TrapSplitConfig()
    corrections: list[str] = Field([])
    """kinds of self-correction to use; empty: all"""
    thoughts: Literal["full", "terse"] = "full"
    """terse: short thoughts from the vocabulary of the embedded model"""
    strict: bool = False
    """treat an unmet target as an error instead of a warning"""
    round: PositiveInt = 2048
    """maximum number of attempts planned at a time"""
    workers: PositiveInt = 2
    """number of synthesis actors"""
    writer: WriterConfig = WriterConfig()
    teacher: TeacherConfig = TeacherConfig()

    @model_validator(mode="after")
    def _known_sources(self) -> SynthesisConfig:
        for name, task in self.tasks.items():
            if unknown := sorted(set(task.source_datasets) - set(self.datasources)):
                raise ValueError(
                    f"tasks.{name}.source_datasets has unknown datasources: {', '.join(unknown)}"
                )
        if not any(self.proportions.model_dump().values()):
            raise ValueError("all proportions are 0")
        if self.proportions.trap and not any(self.traps.model_dump().values()):
            raise ValueError("all shares in traps are 0, but proportions.trap is not")
        return self

    def shares(self) -> dict[str, float]:
        """Kind of sample -> its share; they add up to 1. Samples of a model are all golden."""
        if self.method != "templates":
            return {"golden": 1.0}
        p, traps = self.proportions, self.traps.model_dump()
        total, all_traps = p.golden + p.trap + p.self_correction, sum(traps.values()) or 1.0
        shares = {"golden": p.golden / total}
        shares |= {kind: p.trap / total * share / all_traps for kind, share in traps.items()}
        shares["self_correction"] = p.self_correction / total
        return {kind: share for kind, share in shares.items() if share > 0}
