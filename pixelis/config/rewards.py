"""Configuration of rewards: terms, weights, scorers, the judge, curricula."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import Field, model_validator

from pixelis.config.base import Section, fill_in
from pixelis.config.presets.rewards import REWARD_PRESETS, reward_settings
from pixelis.config.references import is_reference


class CuriosityConfig(Section):
    form: Literal["paper", "repo"] = Field("paper", description="bonus of Pixel-Reasoner's paper or of its code")
    counts: Literal["executed", "requested"] = Field("executed", description="calls that count, for rate, bonus and cost")
    target: float = Field(0.3, ge=0, le=1, description="H: rate of pixel reasoning below which a call earns a bonus")
    alpha: float = Field(0.5, ge=0, description="weight of the bonus in the paper's form")
    free_calls: int = Field(1, ge=0, description="N: calls that cost nothing")
    beta: float = Field(0.05, ge=0, description="cost of each further call")


class RewardWeightsConfig(Section):
    accuracy: float = Field(1.0, description="weight of the answer's score, 0..1")
    wrong: float = Field(0.0, description="weight of the score less 1, -1..0: 1 beside accuracy gives +1 and -1")
    format: float = Field(
        0.0, description="weight of well-formed turns, 0 or 1 (-1 or 0 for rewards.format balanced and boxed_once)"
    )
    curiosity: float = Field(0.0, description="weight of the Pixel-Reasoner bonus and call cost")
    curiosity_bonus: float = Field(0.0, description="weight of the bonus alone")
    efficiency: float = Field(0.0, description="weight of the call cost alone, at most 0")
    tool_if_correct: float = Field(0.0, description="weight of 1 for an executed operation and a right answer")
    tool_penalty: float = Field(0.0, description="weight of minus the score for any call")
    unrepaired_error_zero: float = Field(0.0, description="weight of minus the score when the last call failed: 1 takes it back")
    overlong: float = Field(0.0, description="weight of the soft overlong punishment, -1..0 (DAPO)")
    length: float = Field(0.0, description="weight of brevity within the group, -0.5..0.5, from rewards.length_start on")
    step_markers: float = Field(0.0, description="weight of visible steps in the reasoning, 0..1")
    majority_vote: float = Field(0.0, description="weight of agreeing with the group's majority, 0..1 (TTRL)")
    coherence: float = Field(0.0, description="weight of sensible sequences of operations, -1..1 (Pixelis)")
    curiosity_dynamics: float = Field(0.0, description="weight of what a trained dynamics model did not foresee, 0..1 (Pixelis)")
    tool_misuse: float = Field(0.0, description="weight of the tool penalties, at most 0 (Pixelis)")


FormatKind = Literal["dialect", "think_answer", "caption", "turns", "think_boxed", "balanced", "boxed_once"]


class TaskRewardsConfig(Section):
    weights: RewardWeightsConfig = RewardWeightsConfig()
    format: FormatKind = Field("dialect", description="what well-formed means")


class OverlongConfig(Section):
    max_tokens: int = Field(20480, ge=1, description="generated tokens of an episode that cost 1")
    buffer: int = Field(4096, ge=1, description="tokens before that over which the cost grows")

    @model_validator(mode="after")
    def _ordered(self) -> OverlongConfig:
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer {self.buffer} is above max_tokens {self.max_tokens}")
        return self


class VoteRewardConfig(Section):
    min_share: float = Field(0.0, ge=0, le=1, description="least share of the rollouts that a majority needs")
    tie: Literal["first", "abstain"] = Field(
        "first", description="equal counts: the answer seen first, or no reward for the group"
    )


class DynamicsConfig(Section):
    state: int = Field(768, ge=1, description="size of a state vector of the embedder")
    action: int = Field(128, ge=32, description="size of an action vector")
    hidden: int = Field(256, ge=1, description="size of the hidden layers")
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout while learning")
    lr: float = Field(1e-3, gt=0, description="learning rate of AdamW")
    epochs: int = Field(4, ge=1, description="passes over the transitions of a step")
    eta: float = Field(0.5, gt=0, description="weight of the prediction error")
    beta: float = Field(0.2, ge=0, le=1, description="share of the forward loss; the rest is the inverse loss")
    scale: float = Field(0.1, gt=0, description="weight of the intrinsic reward")


class NormaliseConfig(Section):
    terms: list[str] = Field([], description="terms that become z-scores of running statistics; never a penalty")
    min_samples: int = Field(10, ge=2, description="values seen before a term is normalised")
    min_std: float = Field(0.1, gt=0, description="smallest standard deviation")
    clip: float = Field(3.0, gt=0, description="largest z-score")
    freeze_after: int = Field(0, ge=0, description="values after which the statistics stand still; 0 is never")


class CurriculumConfig(Section):
    kind: Literal["none", "trigger", "steps"] = Field(
        "none", description="weights of accuracy, curiosity_dynamics and coherence: fixed, by progress, or by step"
    )
    trigger: list[tuple[float, float, float]] = Field(
        [(1, 0, 0), (1, 0, 0.1), (1, 0.05, 0.1)],
        min_length=3,
        max_length=3,
        description="weights of the three phases by progress",
    )
    steps: list[tuple[int, float, float, float]] = Field(
        [(0, 1, 0, 0), (5000, 0.7, 0.2, 0.1), (10000, 0.5, 0.3, 0.2)],
        min_length=1,
        description="first step and weights of a phase",
    )
    window: int = Field(100, ge=1, description="steps of the moving averages")
    check_every: int = Field(100, ge=1, description="steps between looks at the triggers")
    min_samples: int = Field(1000, ge=0, description="scored rollouts before the first advance")
    success: float = Field(0.7, description="success rate above which phase 1 ends")
    first_steps: int = Field(10_000, ge=1, description="steps after which phase 1 ends anyway")
    slope: float = Field(0.001, description="slope of coherence over five looks that is no improvement any more")
    patience: int = Field(5, ge=1, description="looks in a row below the slope after which phase 2 ends")
    combined: float = Field(0.65, description="success rate times coherence above which phase 2 ends")
    second_steps: int = Field(20_000, ge=1, description="steps after which phase 2 ends anyway")


class MathScorerConfig(Section):
    workers: int = Field(2, ge=1, description="processes that compare formulas, for each scorer actor")
    timeout_s: float = Field(5.0, gt=0, description="seconds after which a comparison fails and its process is killed")
    memory_bytes: int = Field(2_000_000_000, ge=500_000_000, description="address space of such a process")


class JudgeConfig(Section):
    required: bool = Field(False, description="a missing url, model or key stops the run at its start")
    url: str | None = Field(None, description="base of an OpenAI-compatible API, e.g. http://judge:8000/v1")
    model: str = Field("", description="model that judges")
    api_key_env: str = Field(
        "PIXELIS_JUDGE_API_KEY", description="environment variable that holds the key; empty: no key is sent"
    )
    tries: int = Field(5, ge=1, description="requests for a verdict")
    timeout_s: float = Field(30.0, gt=0, description="seconds a request may take")
    budget_s: float = Field(120.0, gt=0, description="seconds that all tries for a verdict may take")
    concurrency: int = Field(8, ge=1, description="requests at a time, for each scorer actor")
    cache: bool = Field(True, description="keep verdicts in run.dir/judge.sqlite")


class RewardsConfig(Section):
    preset: str | None = Field(None, description=f"named rewards, explicit keys win: {', '.join(REWARD_PRESETS)}")
    weights: RewardWeightsConfig = RewardWeightsConfig()
    tasks: dict[str, TaskRewardsConfig] = Field(
        {}, description="other weights and format for questions of a task (Question.task)"
    )
    own: dict[str, float] = Field(
        {}, description="own rewards, `package.module:function`, and their weights; a list weighs each 1"
    )
    own_timeout_s: float = Field(10.0, gt=0, description="seconds after which an own reward fails and its process is killed")
    own_workers: int = Field(2, ge=1, description="processes that run own rewards, for each scorer actor")
    scorer: str | None = Field(None, description="scorer of every question, in place of the one it names")
    format: FormatKind = Field("dialect", description="what well-formed means")
    curiosity: CuriosityConfig = CuriosityConfig()
    tool_above: float = Field(0.5, ge=0, lt=1, description="score above which a tool bonus is paid")
    max_answer_chars: int = Field(0, ge=0, description="an answer as long as this is wrong and badly formed; 0: any length")
    length_start: int = Field(0, ge=0, description="step before which the length term is 0")
    overlong: OverlongConfig = OverlongConfig()
    vote: VoteRewardConfig = VoteRewardConfig()
    dynamics: DynamicsConfig = DynamicsConfig()
    normalise: NormaliseConfig = NormaliseConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    clip: float = Field(0.0, ge=0, description="largest absolute reward; 0: any")
    math: MathScorerConfig = MathScorerConfig()
    judge: JudgeConfig = JudgeConfig()
    workers: int = Field(1, ge=1, description="scorer actors")
    cpus: float = Field(0.25, ge=0, description="CPUs that each scorer reserves")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """Explicit keys over those of the preset; a list of own rewards weighs each 1."""
        if isinstance(values, dict) and isinstance(values.get("own"), (list, tuple)):
            values = {**values, "own": {str(name): 1.0 for name in values["own"]}}
        return fill_in(values, "preset", reward_settings)

    @property
    def mixtures(self) -> list[RewardWeightsConfig]:
        """Every set of weights that may be in force."""
        return [self.weights, *(task.weights for task in self.tasks.values())]

    @property
    def needs_states(self) -> bool:
        """True when an embedder has to look at every episode."""
        return self.curriculum.kind != "none" or any(w.curiosity_dynamics or w.coherence for w in self.mixtures)

    @property
    def learns_dynamics(self) -> bool:
        """True when a dynamics model is part of the reward, now or in a later phase of the curriculum."""
        return self.curriculum.kind != "none" or any(w.curiosity_dynamics for w in self.mixtures)

    @property
    def stateful(self) -> bool:
        """True when scores depend on earlier ones."""
        return bool(self.normalise.terms) or self.learns_dynamics

    @model_validator(mode="after")
    def _possible(self) -> RewardsConfig:
        never = {"efficiency", "tool_penalty", "tool_misuse", "unrepaired_error_zero", "overlong", "wrong"}
        for name in self.normalise.terms:
            if name not in RewardWeightsConfig.model_fields:
                near = difflib.get_close_matches(name, RewardWeightsConfig.model_fields, n=1)
                raise ValueError(f"normalise.terms: no term `{name}`" + (f" (did you mean `{near[0]}`?)" if near else ""))
            if name in never:
                raise ValueError(f"normalise.terms: {name} is a penalty and is never normalised")
        for name in self.own:
            if not is_reference(name):
                raise ValueError(f"own: `{name}` is not written package.module:function")
        if self.stateful and self.workers > 1:
            raise ValueError("normalise, curriculum and curiosity_dynamics keep running state: set workers=1")
        return self
