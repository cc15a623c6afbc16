"""Configuration of synthesis: sources, tasks with target counts, proportions, mistakes, and language models that help."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pixelis.config.base import Section


class DatasourceConfig(Section):
    path: str = Field(description="questions with annotations: `packaged:NAME?split=train`, `coco:/data/coco?split=...`, a file")
    rows: int = Field(0, ge=0, description="use only the first N rows; 0 is all")


class SynthesisTaskConfig(Section):
    enabled: bool = Field(True, description="false: leave this task out")
    target_sample_count: int = Field(100, ge=1, description="samples to make, mistakes and self-corrections among them")
    source_datasets: dict[str, float] = Field(
        description="weight of each datasource; a list of names weighs each 1", min_length=1
    )

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
            raise ValueError("weights of source_datasets are above 0")
        return self


class ProportionsConfig(Section):
    golden: float = Field(0.6, ge=0, description="share of right samples")
    trap: float = Field(0.2, ge=0, description="share of samples that are wrong on purpose")
    self_correction: float = Field(0.2, ge=0, description="share of samples that go wrong at first and notice")


class TrapSplitConfig(Section):
    outcome_negative: float = Field(0.5, ge=0, description="share of traps of which only the answer is wrong")
    trap_perceptual: float = Field(0.25, ge=0, description="share of traps that look at a near miss")
    trap_logical: float = Field(0.25, ge=0, description="share of traps whose last inference is invalid")


class SampleWeightsConfig(Section):
    trap: float = Field(1.5, gt=0, description="sampling weight of perceptual and logical traps")
    self_correction: float = Field(1.2, gt=0, description="sampling weight of self-corrections")


class ChatConfig(Section):
    url: str | None = Field(None, description="base of an OpenAI-compatible API, e.g. http://models:8000/v1; empty: none")
    model: str = Field("", description="model that is asked")
    api_key_env: str = Field(
        "PIXELIS_SYNTHESIS_API_KEY", description="environment variable that holds the key; empty: no key is sent"
    )
    temperature: float = Field(0.7, ge=0, le=2, description="sampling temperature of the first try")
    max_tokens: int = Field(1024, ge=1, description="longest reply in tokens")
    calls_per_minute: float = Field(60.0, gt=0, description="requests a minute of each worker")
    tries: int = Field(3, ge=1, description="requests for a reply that can be used")
    timeout_s: float = Field(30.0, gt=0, description="seconds a request may take")
    budget_s: float = Field(120.0, gt=0, description="seconds that all tries for a reply may take")
    cache: bool = Field(True, description="keep replies in run.dir, by the hash of what was asked")


class WriterConfig(ChatConfig):
    on_reject: Literal["template", "drop"] = Field(
        "template",
        description="thoughts that fail their checks in all tries: keep the template's, or drop the sample",
    )
    min_chars: int = Field(8, ge=1, description="shortest thought")
    max_chars: int = Field(600, ge=1, description="longest thought")
    similarity: float = Field(0.8, ge=0, le=1, description="largest likeness of the last thought and the answer")


class ImitationConfig(ChatConfig):
    plays: Literal["turns", "gateway"] = Field(
        "turns",
        description="turns: a model imitates demonstrations turn by turn; gateway: a policy served by `serve`",
    )
    demonstrations: str = Field("", description="JSON lines of demonstrations to imitate, shown in the prompt")
    shots: int = Field(6, ge=1, description="demonstrations shown in the prompt")
    max_turns: int = Field(6, ge=1, description="turns of an episode, the answer among them")


class DistillationConfig(ChatConfig):
    responses: str = Field("responses", description="where a row's meta holds replies; rows without them: the model is asked")
    min_chars: int = Field(20, ge=0, description="shortest thought")
    max_chars: int = Field(4000, ge=1, description="longest thought")


class SynthesisConfig(Section):
    method: Literal["templates", "imitation", "distillation"] = Field(
        "templates", description="where right samples come from: annotations, a model that plays episodes, or replies of a model"
    )
    datasources: dict[str, DatasourceConfig] = Field({}, description="sources by name")
    tasks: dict[str, SynthesisTaskConfig] = Field({}, description="tasks by name with target counts and weighted sources")
    proportions: ProportionsConfig = ProportionsConfig()
    traps: TrapSplitConfig = TrapSplitConfig()
    weights: SampleWeightsConfig = SampleWeightsConfig()
    corrections: list[str] = Field([], description="kinds of self-correction to choose from; empty: all")
    most_iou: float = Field(0.3, gt=0, lt=1, description="overlap of a mistaken place with the right one, at most")
    thoughts: Literal["full", "terse"] = Field("full", description="terse: few words, those of the embedded model's tokenizer")
    passes: int = Field(4, ge=1, description="times a source's rows are gone through for a task before a target counts as unmet")
    strict: bool = Field(False, description="an unmet target is an error instead of a warning")
    keep_annotations: bool = Field(True, description="samples keep the annotations they were made from")
    shard: int = Field(64, ge=1, description="attempts in one file; what a stop repeats")
    round: int = Field(2048, ge=1, description="most attempts that are planned at a time")
    workers: int = Field(2, ge=1, description="synthesis actors")
    cpus: float = Field(0.5, ge=0, description="CPUs that each actor reserves")
    writer: WriterConfig = WriterConfig()
    imitation: ImitationConfig = ImitationConfig()
    distillation: DistillationConfig = DistillationConfig()

    @model_validator(mode="after")
    def _known_sources(self) -> SynthesisConfig:
        for name, task in self.tasks.items():
            if unknown := sorted(set(task.source_datasets) - set(self.datasources)):
                raise ValueError(f"tasks.{name}.source_datasets names no datasource: {', '.join(unknown)}")
        if not self.proportions.golden + self.proportions.trap + self.proportions.self_correction > 0:
            raise ValueError("proportions are all 0")
        t = self.traps
        if self.proportions.trap and not t.outcome_negative + t.trap_perceptual + t.trap_logical > 0:
            raise ValueError("traps are all 0 but proportions.trap is not")
        return self

    def shares(self) -> dict[str, float]:
        """Share of each kind of sample, adding up to 1; a model's own samples are all golden."""
        if self.method != "templates":
            return {"golden": 1.0}
        p, t = self.proportions, self.traps
        whole = p.golden + p.trap + p.self_correction
        traps = t.outcome_negative + t.trap_perceptual + t.trap_logical or 1.0
        out = {"golden": p.golden / whole}
        out |= {kind: p.trap / whole * share / traps for kind, share in t.model_dump().items()}
        out["self_correction"] = p.self_correction / whole
        return {kind: share for kind, share in out.items() if share > 0}
