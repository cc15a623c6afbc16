"""Configuration of rewards: terms, weights, scorers, the judge, curricula."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pixelis.config.base import Section, Share, apply_preset, check_name
from pixelis.config.llm import LlmConfig
from pixelis.config.presets.rewards import REWARD_PRESETS, reward_settings
from pixelis.config.references import is_function


class CuriosityConfig(Section):
    form: Literal["paper", "repo"] = "paper"
    """bonus of the Pixel-Reasoner paper, for executed calls, or of its code, for requested ones"""
    target: Share = 0.3
    """H: rate of pixel reasoning below which calls earn a bonus"""
    alpha: NonNegativeFloat = 0.5
    """weight of the bonus in the paper's form"""
    free_calls: NonNegativeInt = 1
    """N: calls without cost; more where a refined question's reference makes more"""
    beta: NonNegativeFloat = 0.05
    """cost of each further call"""

    @property
    def counts(self) -> Literal["executed", "requested"]:
        """Calls that count for rate, bonus and cost."""
        return "executed" if self.form == "paper" else "requested"


class RewardWeightsConfig(Section):
    accuracy: float = 1.0
    """weight of the score of the answer, 0..1"""
    wrong: float = 0.0
    """weight of the score minus 1, -1..0; with accuracy 1 and wrong 1 the reward is +1 or -1"""
    format: float = 0.0
    """weight of well-formed turns, 0 or 1 (-1 or 0 for rewards.format balanced and boxed_once)"""
    curiosity: float = 0.0
    """weight of the Pixel-Reasoner bonus and call cost"""
    curiosity_bonus: float = 0.0
    """weight of the bonus alone"""
    efficiency: float = 0.0
    """weight of the call cost alone, at most 0"""
    tool_if_correct: float = 0.0
    """weight of using an operation and answering correctly, 0 or 1"""
    tool_calls_if_correct: float = 0.0
    """weight of the number of executed operations of a correct answer (PyVision-RL)"""
    adaptive_calls: float = 0.0
    """weight of calls only where they pay, 0..1, by the other rollouts of the group (Chain-of-Focus)"""
    tool_penalty: float = 0.0
    """weight of minus the score when any operation is called"""
    unrepaired_error_zero: float = 0.0
    """weight of minus the score when the last call failed; 1 cancels the score"""
    overlong: float = 0.0
    """weight of the soft overlong penalty, -1..0 (DAPO)"""
    length: float = 0.0
    """weight of brevity relative to the group, -0.5..0.5, starting at step rewards.length_start"""
    step_markers: float = 0.0
    """weight of explicit steps in the reasoning, 0..1"""
    majority_vote: float = 0.0
    """weight of agreement with the majority of the group, 0..1 (TTRL)"""
    coherence: float = 0.0
    """weight of coherent sequences of operations, -1..1 (Pixelis)"""
    curiosity_dynamics: float = 0.0
    """weight of the prediction error of a trained dynamics model, 0..1 (Pixelis)"""
    tool_misuse: float = 0.0
    """weight of the tool penalties, at most 0 (Pixelis)"""
    causal_use: float = 0.0
    """weight of what a right answer owes to its calls, 0..1 (docs/looking.md)"""
    dual_iou: float = 0.0
    """weight of how well the regions that a right answer's calls showed match the annotated ones, 0..1 (TreeVGR)"""
    environment: float = 0.0
    """weight of the sum of the rewards that the question's environment gave"""


LABELLED = (
    "accuracy",
    "wrong",
    "tool_if_correct",
    "tool_calls_if_correct",
    "adaptive_calls",
    "tool_penalty",
    "unrepaired_error_zero",
    "length",
    "causal_use",
    "dual_iou",
)
"""Terms that compare an answer with the question's truths."""
PENALTIES = ("efficiency", "tool_penalty", "tool_misuse", "unrepaired_error_zero", "overlong", "wrong")
ALWAYS = ("accuracy", "format", "curiosity")
"""Terms that are computed and logged even with weight 0."""
CURRICULUM_TERMS = ("accuracy", "curiosity_dynamics", "coherence")
"""Terms with weights of the curriculum, in the order of the configured tuples."""

EXTRACTORS = ("dialect", "tags", "lenient", "whole", "reply")
FormatKind = Literal["dialect", "think_answer", "caption", "turns", "think_boxed", "balanced", "boxed_once"]


class TaskRewardsConfig(Section):
    weights: RewardWeightsConfig = RewardWeightsConfig()
    format: FormatKind = "dialect"
    """definition of a well-formed turn"""
    scorer: str | None = None
    """scorer for the questions of the task, instead of the one that each names"""


class OverlongConfig(Section):
    max_tokens: PositiveInt = 20480
    """generated tokens of an episode at which the penalty is 1"""
    buffer: PositiveInt = 4096
    """number of tokens before max_tokens over which the penalty grows"""

    @model_validator(mode="after")
    def _ordered(self) -> OverlongConfig:
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer {self.buffer} is above max_tokens {self.max_tokens}")
        return self


class VoteRewardConfig(Section):
    min_share: Share = 0.0
    """minimum share of the rollouts for a majority"""
    tie: Literal["first", "abstain"] = "first"
    """tie: the answer that occurs first wins, or the group gets no reward"""


class NormaliseConfig(Section):
    terms: list[str] = Field([])
    """terms to normalise to z-scores with running statistics; penalties are not allowed"""


class CurriculumConfig(Section):
    kind: Literal["none", "trigger", "steps"] = "none"
    """schedule of the weights of accuracy, curiosity_dynamics and coherence: constant (none), by progress
    (trigger) or by step (steps)"""
    trigger: list[tuple[float, float, float]] = Field(
        [(1, 0, 0), (1, 0, 0.1), (1, 0.05, 0.1)], min_length=3, max_length=3
    )
    """kind=trigger: weights in each of the three phases"""
    steps: list[tuple[int, float, float, float]] = Field(
        [(0, 1, 0, 0), (5000, 0.7, 0.2, 0.1), (10000, 0.5, 0.3, 0.2)], min_length=1
    )
    """kind=steps: first step and weights of each phase"""
    window: PositiveInt = 100
    """number of steps of the moving averages"""
    check_every: PositiveInt = 100
    """steps between checks of the triggers"""
    min_samples: NonNegativeInt = 1000
    """scored rollouts before phase 1 can end"""
    first_steps: PositiveInt = 10_000
    """maximum number of steps of phase 1"""
    patience: PositiveInt = 5
    """consecutive checks without progress of coherence after which phase 2 ends"""
    second_steps: PositiveInt = 20_000
    """maximum number of steps of phase 2"""


class JudgeConfig(LlmConfig):
    required: bool = False
    """a missing url, model or key is an error at the start"""
    api_key_env: str = "PIXELIS_JUDGE_API_KEY"
    """environment variable with the API key; empty: no key is sent"""
    tries: PositiveInt = 5
    """maximum number of requests for a verdict"""
    concurrency: PositiveInt = 8
    """concurrent requests of each scorer actor"""


class RewardsConfig(Section):
    preset: str | None = Field(
        None,
        description=f"named settings of rewards; explicit keys override them: {', '.join(REWARD_PRESETS)}",
    )
    weights: RewardWeightsConfig = RewardWeightsConfig()
    tasks: dict[str, TaskRewardsConfig] = Field({})
    """weights and format for the questions of a task (Question.task)"""
    own: dict[str, float] = Field({})
    """your own reward functions (`package.module:function` or `path.py:function`, also those of EasyR1) and
    their weights; a list gives each the weight 1"""
    timeout_s: PositiveFloat = 10.0
    """timeout in seconds of a comparison of formulas or a function of yours, after which its process is
    killed"""
    scorer: str | None = None
    """scorer for all questions, instead of the one that each question names; also your own function of
    (answer, truth), `package.module:function` or `path.py:function`"""
    scorers: dict[str, str] = Field({})
    """scorers that replace those that questions name, e.g. {math: exact}"""
    extractor: str = "dialect"
    """where the answer is read: dialect; tags (answer tags alone); lenient (also `The answer is 7.`,
    untagged); whole (else the whole text: another model's answers); reply (all that the policy wrote: scorers
    `*_repo`); or your own function of the last text"""
    format: FormatKind = "dialect"
    """definition of a well-formed turn"""
    curiosity: CuriosityConfig = CuriosityConfig()
    tool_above: float = Field(0.5, ge=0, lt=1)
    """score above which tool_if_correct and tool_calls_if_correct count an answer as correct"""
    max_answer_chars: NonNegativeInt = 0
    """length from which an answer counts as wrong and malformed; 0: no limit"""
    length_start: NonNegativeInt = 0
    """first step of the length term"""
    overlong: OverlongConfig = OverlongConfig()
    vote: VoteRewardConfig = VoteRewardConfig()
    normalise: NormaliseConfig = NormaliseConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    clip: NonNegativeFloat = 0.0
    """maximum absolute reward; 0: no limit"""
    judge: JudgeConfig = JudgeConfig()
    workers: PositiveInt = 1
    """scorer actors"""
    cpus: NonNegativeFloat = 0.25
    """CPUs that each scorer reserves"""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        """Apply the preset below the explicit keys; a list of own rewards gives each the weight 1."""
        if isinstance(values, dict) and isinstance(values.get("own"), (list, tuple)):
            values = {**values, "own": {str(name): 1.0 for name in values["own"]}}
        return apply_preset(values, "preset", reward_settings)

    def scorer_of(self, task: str, scorer: str) -> str:
        """The scorer of a question of this task that names ``scorer``."""
        own = self.tasks[task].scorer if task in self.tasks else None
        return own or self.scorer or self.scorers.get(scorer, scorer)

    @property
    def mixtures(self) -> list[RewardWeightsConfig]:
        return [self.weights, *(task.weights for task in self.tasks.values())]

    @property
    def computed(self) -> list[str]:
        """Terms with a weight for any question or in a curriculum, and ALWAYS."""
        names = {*ALWAYS, *(CURRICULUM_TERMS if self.curriculum.kind != "none" else ())}
        names |= {
            name for weights in self.mixtures for name, weight in weights.model_dump().items() if weight
        }
        return [name for name in RewardWeightsConfig.model_fields if name in names]

    @property
    def labelled(self) -> list[str]:
        """Keys that let a true answer influence training, in any phase of the curriculum."""
        curriculum, keys = self.curriculum, [f"rewards.own.{name}" for name in self.own]
        keys += [
            f"rewards.weights.{name}"
            for mixture in self.mixtures
            for name in LABELLED
            if getattr(mixture, name)
        ]
        if curriculum.kind == "trigger":  # its phases end by the success rate
            keys.append("rewards.curriculum.kind=trigger")
        if curriculum.kind == "steps" and any(accuracy for _, accuracy, *_ in curriculum.steps):
            keys.append("rewards.curriculum.steps")
        return keys

    @property
    def needs_states(self) -> bool:
        """Whether rewards need vectors of every episode from the embedder."""
        return self.curriculum.kind != "none" or any(
            w.curiosity_dynamics or w.coherence for w in self.mixtures
        )

    @property
    def learns_dynamics(self) -> bool:
        """Whether a dynamics model is trained, now or in a later phase of the curriculum."""
        return self.curriculum.kind != "none" or any(w.curiosity_dynamics for w in self.mixtures)

    @property
    def stateful(self) -> bool:
        """Whether scores depend on earlier scores."""
        return bool(self.normalise.terms) or self.learns_dynamics

    @property
    def needs_scorer(self) -> bool:
        """Whether only a Scorer actor can score."""
        return self.stateful or self.needs_states

    @model_validator(mode="after")
    def _consistent(self) -> RewardsConfig:
        for name in self.normalise.terms:
            check_name("term", name, RewardWeightsConfig.model_fields)
            if name in PENALTIES:
                raise ValueError(f"normalise.terms: {name} is a penalty and must not be normalised")
        for name in (*self.own, self.extractor):
            if name not in EXTRACTORS and not is_function(name):
                raise ValueError(f"`{name}` is not of the form package.module:function or path.py:function")
        if self.stateful and self.workers > 1:
            raise ValueError("normalise, curriculum and curiosity_dynamics keep running state: set workers=1")
        return self
