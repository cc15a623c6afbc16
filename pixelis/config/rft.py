"""Configuration of reinforcement fine-tuning: sampling, advantages, loss."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from pixelis.config.base import Section, Share, apply_preset, unknown_keys
from pixelis.config.engine import SamplingConfig
from pixelis.config.presets.algorithms import (
    ALGORITHMS,
    BASELINES,
    GROUP_BASELINES,
    SURROGATES,
    algorithm_settings,
    check_function,
)
from pixelis.config.teacher import TeacherConfig
from pixelis.errors import BadConfig


class AdvantageConfig(Section):
    baseline: str = Field(
        "mean",
        description=f"baseline subtracted from the reward ({', '.join(BASELINES)}): mean of the group, "
        "mean of its other rollouts, reward of a greedy rollout, mean of the batch, nothing, values of a "
        "critic (PPO); pass_at_k and second_best are separate advantages; or your own package.module:function",
    )
    scale: Literal["std", "mad", "batch_std", "none"] = "std"
    """divisor of the advantage; batch_std: whiten over the whole batch"""
    eps: PositiveFloat = 1e-4
    """added to the divisor"""
    k: PositiveInt = 4
    """k of pass_at_k"""
    gamma: float = Field(1.0, gt=0, le=1)
    """discount from token to token, for the baselines none and critic"""
    lam: Share = 0.95
    """lambda of generalised advantage estimation, for baseline critic"""
    batch_over: Literal["sequence", "token"] = "sequence"
    """statistics of the batch: each rollout counts once, or each token"""
    min_group: PositiveInt = 2
    """minimum number of scored rollouts of a group"""
    exclude: list[
        Literal[
            "no_action", "call", "length", "over_turn", "over_context", "over_images", "deadline", "error"
        ]
    ] = Field([])
    """stop reasons of rollouts that are excluded from statistics and loss, as unscored ones always are"""
    count_excluded: bool = False
    """count excluded rollouts with reward 0 in the statistics of their group, as Mini-o3's code does"""

    @field_validator("baseline")
    @classmethod
    def _baseline_exists(cls, name: str) -> str:
        check_function("advantage", name)
        return name

    @model_validator(mode="after")
    def _consistent(self) -> AdvantageConfig:
        in_group = self.baseline in GROUP_BASELINES
        is_own = self.baseline not in BASELINES
        if self.scale in ("std", "mad") and not in_group and not is_own:
            raise ValueError(f"baseline {self.baseline} is over no group: set scale=none or batch_std")
        if self.min_group < 2 and (in_group or self.scale in ("std", "mad")):
            raise ValueError("baseline or scale compares rollouts of a group: set min_group to 2 or more")
        if self.scale == "mad" and self.baseline in ("pass_at_k", "second_best"):
            raise ValueError(f"scale mad cannot be combined with baseline {self.baseline}: set scale=std")
        return self


class LossConfig(Section):
    surrogate: str = Field(
        "clip",
        description=f"surrogate objective ({', '.join(SURROGATES)}): PPO clipping, clipped weight on "
        "log-probs (CISPO), soft gate (SAPO), no ratio; or your own package.module:function",
    )
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """ratio of each token, or its mean over the sequence (sequence: GSPO, sequence_token: GSPO-token)"""
    proximal: Literal["learner", "behaviour"] = "learner"
    """denominator of the ratio: log-probs of the learner before the batch, or of the engine"""
    clip_low: PositiveFloat = 0.2
    """ratio clipped below 1 - clip_low"""
    clip_high: PositiveFloat = 0.2
    """ratio clipped above 1 + clip_high"""
    dual_clip: NonNegativeFloat = 0.0
    """dual-clip constant c: bound of the loss, in multiples of a negative advantage; 0: off"""
    aggregate: Literal["token", "sequence", "constant"] = "token"
    """loss of a batch: mean over all tokens, mean over sequences of token means, or sum divided by a constant
    length"""
    constant_tokens: NonNegativeInt = 0
    """divisor of aggregate=constant; 0: dialogue.max_turns * dialogue.max_turn_tokens"""
    kl: NonNegativeFloat = 0.0
    """weight of the KL divergence to the starting policy"""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k3"
    """KL divergence per token: an estimate from the sampled token, or with `full` the sum over the
    vocabulary, which costs two more passes of the LM head"""
    kl_target: NonNegativeFloat = 0.0
    """adapts the weight `kl` so that the divergence per token approaches this; 0: the weight is fixed"""
    kl_in: Literal["loss", "reward"] = "loss"
    """place of the KL term: in the loss, or subtracted from the reward (with k1): at each token for the
    baselines none and critic, otherwise as a sum"""
    entropy: NonNegativeFloat = 0.0
    """weight of the entropy bonus"""
    importance: Literal["truncate", "mask", "none"] = "truncate"
    """importance weights (learner / engine) outside of the bounds: truncate them, mask the tokens, or no
    weights"""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """importance weight per token, product over the sequence, or its geometric mean"""
    importance_cap: PositiveFloat = 2.0
    """upper bound of the importance weights"""
    importance_floor: NonNegativeFloat = 0.0
    """lower bound of the importance weights"""

    @field_validator("surrogate")
    @classmethod
    def _surrogate_exists(cls, name: str) -> str:
        check_function("surrogate", name)
        return name

    @model_validator(mode="after")
    def _consistent(self) -> LossConfig:
        if self.dual_clip and (self.surrogate != "clip" or self.dual_clip <= 1 + self.clip_high):
            raise ValueError("dual_clip needs surrogate=clip and a value above 1 + clip_high")
        if self.surrogate == "reinforce" and self.ratio != "token":
            raise ValueError(f"surrogate reinforce has no ratio, but ratio={self.ratio}")
        if self.kl > 0 and self.kl_in == "reward" and self.kl_estimator != "k1":
            raise ValueError(f"kl_in=reward needs kl_estimator=k1, not {self.kl_estimator}")
        if self.kl_target and not self.kl:
            raise ValueError("kl_target adapts the weight kl, which must start above 0")
        if self.importance_floor >= self.importance_cap:
            raise ValueError("importance_floor is not below importance_cap")
        return self


class CriticConfig(Section):
    """The value head of PPO."""

    lr: PositiveFloat = 1e-3
    """learning rate of AdamW"""
    clip: PositiveFloat = 0.2
    """farther from its value before the batch, a value no longer changes the loss"""


class GroupFilterConfig(Section):
    key: str = "none"
    """replace groups in which this value is equal: `reward`, or a term of rewards.weights or rewards.own;
    accuracy: groups whose rollouts are all correct or all wrong (DAPO); none: keep all groups"""
    min_std: NonNegativeFloat = 1e-4
    """minimum standard deviation of the key in a group"""
    low: float | None = None
    """the mean of the key in a group must be above (EasyR1: 0.01)"""
    high: float | None = None
    """the mean of the key in a group must be below (EasyR1: 0.99)"""
    complete: bool = False
    """also replace groups with an unscored rollout, for example after a failed call of the judge (Mini-o3)"""
    max_oversampling: float = Field(3.0, ge=1)
    """maximum number of questions for a batch, as a multiple of rft.prompts_per_step; after that the batch
    stays smaller"""

    @model_validator(mode="after")
    def _ordered(self) -> GroupFilterConfig:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")
        return self


class ReplayConfig(Section):
    capacity: NonNegativeInt = 0
    """number of rollouts kept to fill smaller batches (selective sample replay); 0: off"""
    alpha: NonNegativeFloat = 1.0
    """a rollout is replayed with probability proportional to |advantage| ** alpha"""
    min_advantage: NonNegativeFloat = 0.0
    """a rollout is kept if its |advantage| is larger"""
    quantile: float = Field(0.0, ge=0, lt=1)
    """a rollout is kept if its |advantage| is in this quantile of its batch; 0.7: in the top 30 %"""
    share: float = Field(0.0, ge=0, lt=1)
    """share of a batch for kept rollouts beside the fresh ones; 0: they only fill it up"""


class RftConfig(Section):
    algorithm: str | None = Field(
        None,
        description=f"named settings of rft; explicit keys override them: {', '.join(ALGORITHMS)}; or your "
        "own "
        "package.module:NAME",
    )
    steps: PositiveInt = 40
    """number of training steps"""
    epochs: NonNegativeFloat = 0.0
    """epochs over the questions, instead of `steps`; 0: use `steps`"""
    prompts_per_step: PositiveInt = 32
    """questions per step"""
    group_size: PositiveInt = 8
    """rollouts per question"""
    causal_use: Share = 0.0
    """share of the questions whose calls are measured for rollout/causal_use (docs/looking.md); all with
    rewards.weights.causal_use"""
    train_samples: NonNegativeInt = 0
    """rollouts per group to train on; the others only vote (TTRL: 32 of 64); 0: all"""
    choose: Literal["first", "random", "stratified"] = "first"
    """choice of the train_samples: the first (TTRL), random, or with the reward distribution of the group"""
    minibatches: PositiveInt = 1
    """optimizer steps per pass through a batch"""
    epochs_per_batch: PositiveInt = 1
    """passes through a batch, each with `minibatches` optimizer steps"""
    max_off_policy_steps: NonNegativeInt = 0
    """maximum number of steps that rollouts lag behind the learner; 0: exactly on-policy"""
    agent: str | None = None
    """outside agent that plays the episodes instead of the policy's own loop: an async function,
    `package.module:name` or `path.py:name`; http: programs that take the questions from the address in
    run.dir/episodes.json"""
    agent_workers: PositiveInt = 1
    """processes that run the agent's function"""
    agent_timeout_s: PositiveFloat = 300.0
    """timeout in seconds of an episode of an outside agent"""
    agent_address: str = "127.0.0.1:0"
    """address of the episode routes for agent=http; with port 0 any free one"""
    sampling: SamplingConfig = SamplingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    critic: CriticConfig = CriticConfig()
    filter: GroupFilterConfig = GroupFilterConfig()
    replay: ReplayConfig = ReplayConfig()
    teacher: TeacherConfig = TeacherConfig()
    """on-policy distillation"""
    evaluate_every: NonNegativeInt = 0
    """steps between evaluations on held-out questions; 0: never"""
    evaluate_first: bool = False
    """evaluate on held-out questions before the first step too"""

    @property
    def by_token(self) -> bool:
        """Whether each token has its own advantage: with a critic, or returns that differ from token to
        token.
        """
        returns = self.advantage.gamma < 1 or (self.loss.kl > 0 and self.loss.kl_in == "reward")
        return self.advantage.baseline == "critic" or (self.advantage.baseline == "none" and returns)

    @model_validator(mode="before")
    @classmethod
    def _apply_algorithm(cls, values: Any) -> Any:
        def settings_of(algorithm: str) -> dict[str, Any]:
            settings = algorithm_settings(algorithm)
            if unknown := unknown_keys(cls, settings, "rft."):
                message = f"rft.algorithm: {algorithm} sets unknown configuration key {'; '.join(unknown)}"
                raise BadConfig(message, fix="see `--help`")
            return settings

        return apply_preset(values, "algorithm", settings_of)

    @model_validator(mode="after")
    def _enough_samples(self) -> RftConfig:
        if self.train_samples and not self.advantage.min_group <= self.train_samples <= self.group_size:
            raise ValueError(
                f"train_samples {self.train_samples} is not between advantage.min_group and group_size"
            )
        return self
