"""Configuration of evaluations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from pixelis.config.base import Section, check_file_name
from pixelis.config.engine import SamplingConfig
from pixelis.config.llm import LlmConfig

System = Literal["pixel_reasoner", "r1_v", "deepeyes", "mini_o3"]


class ApiConfig(LlmConfig):
    api_key_env: str = "PIXELIS_EVALUATE_API_KEY"
    """environment variable with the API key; empty: no key is sent"""
    concurrency: PositiveInt = 8
    """concurrent requests"""
    tries: PositiveInt = 8
    """maximum number of requests for an answer"""
    timeout_s: PositiveFloat = 300.0
    """timeout in seconds of a request"""
    parameters: dict[str, Any] = Field({"max_tokens": 4096})
    """further fields of each request, e.g. {max_tokens: 4096, reasoning_effort: low}"""
    operations: bool = False
    """offer the operations of dialogue.dialect as text, and run them on the toolboxes of a cluster; the
    pictures are then shown within the pixel budgets of dialogue"""


class EvaluateConfig(Section):
    questions: NonNegativeInt = 500
    """number of held-out questions, the first of each set; 0: all"""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    """sampling of the answers"""
    samples: PositiveInt = 1
    """episodes of a question; with more than 1 also avg@k, pass@k and maj@k"""
    seeds: list[int] = Field([])
    """evaluate with each of these sampling seeds instead of run.seed, with samples episodes of each; like
    samples also in evaluations during sft and rft, whose accuracy is the mean over all episodes"""
    sets: dict[str, str] = Field({})
    """several sources by name instead of data.evaluate, such as {id: ..., ood: ...}, and their mean; also the
    evaluations during sft and rft, whose best checkpoint is that of the best mean"""
    max_pixels: list[Annotated[int, Field(ge=1)]] = Field([])
    """evaluate once with each of these budgets instead of dialogue.input.max_pixels and
    dialogue.crop.max_pixels"""
    images: bool = False
    """save every picture that the policy saw as a file, named in the trajectories"""
    outputs: list[System] = Field([])
    """write the results also as the evaluation of these systems does"""
    answers: str | None = None
    """file of another model's answers to score (JSON, JSON lines, Parquet; column `pred`, `model_output`)"""
    api: ApiConfig = ApiConfig()
    """evaluate the model behind this OpenAI-compatible address instead of a policy"""
    causal_use: NonNegativeInt = 50
    """number of questions, evenly spread over each set, whose calls are scored again with other observations
    in their place, to tell what the answers owe to them (docs/looking.md); 0: none"""
    direct: bool = False
    """answer the same questions also without operations, and compare the two in pairs (`evaluate` only)"""
    baseline: str | None = None
    """run.dir of another evaluation of the same questions, to compare with in pairs"""
    published: str | None = None
    """TOML file of published figures to compare with (docs/reproduce.md; `evaluate` only)"""
    clusters: NonNegativeInt = 0
    """sort all questions into so many clusters of similar pictures and texts (shares of the variance:
    memory.visual), and show how often each is wrong, with pictures (`evaluate` only); 0: none"""

    @field_validator("sets")
    @classmethod
    def _name_files(cls, sets: dict[str, str]) -> dict[str, str]:
        for name in sets:
            check_file_name(name)
        return sets

    @model_validator(mode="after")
    def _possible(self) -> EvaluateConfig:
        if self.direct and self.api.url is not None and not self.api.operations:
            raise ValueError("direct compares answers with and without operations: set api.operations=true")
        if self.images and self.api.url is not None:
            raise ValueError("images saves what a policy of ours saw: set images=false")
        if self.clusters and (self.api.url is not None or self.answers is not None):
            raise ValueError("clusters needs the vectors of a policy: set clusters=0")
        if self.clusters == 1:
            raise ValueError("clusters are compared with each other: set 2 or more, or 0")
        if 0 < self.questions < 2 * self.clusters:
            raise ValueError(f"clusters={self.clusters} needs at least questions={2 * self.clusters}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: each may stand once")
        return self
