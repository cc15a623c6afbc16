"""Configuration of reinforcement fine-tuning: sampling, advantages, loss."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pixelis.config.base import Section, fill_in, unknown_keys
from pixelis.config.engine import SamplingConfig
from pixelis.config.presets.algorithms import (
    ALGORITHMS,
    BASELINES,
    GROUP_BASELINES,
    SURROGATES,
    algorithm_settings,
    check_function,
)
from pixelis.errors import BadConfig


class AdvantageConfig(Section):
    baseline: str = Field(
        "mean",
        description=f"what is subtracted ({', '.join(BASELINES)}): mean of the group, of its other rollouts, reward of a greedy "
        "rollout, mean of the batch, nothing; pass_at_k and second_best are advantages of their own; or your own "
        "package.module:function",
    )
    scale: Literal["std", "mad", "batch_std", "none"] = Field(
        "std", description="what the difference is divided by; batch_std whitens over the whole batch"
    )
    eps: float = Field(1e-4, gt=0, description="added to the divisor")
    k: int = Field(4, ge=1, description="attempts that pass_at_k is about")
    batch_over: Literal["sequence", "token"] = Field(
        "sequence", description="whether a rollout counts once or by its tokens in the statistics of the batch"
    )
    min_group: int = Field(2, ge=1, description="scored rollouts a group needs to be used")
    exclude: list[Literal["no_action", "length", "over_turn", "over_context", "over_images", "deadline", "error"]] = Field(
        [], description="stop reasons of rollouts that are left out of statistics and loss, as unscored ones always are"
    )
    excluded_count: bool = Field(False, description="excluded rollouts count in the statistics with reward 0 (Mini-o3's code)")

    @field_validator("baseline")
    @classmethod
    def _baseline_exists(cls, name: str) -> str:
        check_function("advantage", name)
        return name

    @model_validator(mode="after")
    def _possible(self) -> AdvantageConfig:
        in_group = self.baseline in GROUP_BASELINES
        is_own = self.baseline not in BASELINES
        if in_group and self.min_group < 2:
            raise ValueError(f"baseline {self.baseline} compares rollouts of a group: set min_group to 2 or more")
        if self.scale in ("std", "mad") and not in_group and not is_own:
            raise ValueError(f"scale {self.scale} is of a group but baseline {self.baseline} is not: set scale=none or batch_std")
        if self.scale in ("std", "mad") and self.min_group < 2:
            raise ValueError(f"scale {self.scale} compares rollouts of a group: set min_group to 2 or more")
        if self.scale == "mad" and self.baseline in ("pass_at_k", "second_best"):
            raise ValueError(f"scale mad does not go with baseline {self.baseline}: set scale=std")
        return self


class LossConfig(Section):
    surrogate: str = Field(
        "clip",
        description=f"what is maximised ({', '.join(SURROGATES)}): PPO clipping, clipped weight on log-probs (CISPO), soft gate "
        "(SAPO), no ratio at all; or your own package.module:function",
    )
    ratio: Literal["token", "sequence", "sequence_token"] = Field(
        "token", description="ratio of each token, or the geometric mean of the sequence (GSPO; sequence_token: GSPO-token)"
    )
    proximal: Literal["learner", "behaviour"] = Field(
        "learner", description="denominator of the ratio: the weights before the batch's first step, or the engine's log-probs"
    )
    clip_low: float = Field(0.2, gt=0, description="ratio clipped below 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="ratio clipped above 1 + clip_high")
    dual_clip: float = Field(0.0, ge=0, description="c: with a negative advantage the loss is at most c times it; 0 is off")
    sapo_positive: float = Field(1.0, gt=0, description="temperature of the soft gate for positive advantages")
    sapo_negative: float = Field(1.05, gt=0, description="temperature of the soft gate for negative advantages")
    aggregate: Literal["token", "sequence", "constant"] = Field(
        "token", description="mean over all tokens of the batch, over sequences of token means, or sum over a constant length"
    )
    constant_tokens: int = Field(
        0, ge=0, description="length that aggregate=constant divides by; 0: dialogue.max_turns * dialogue.max_turn_tokens"
    )
    kl: float = Field(0.0, ge=0, description="weight of the KL divergence to the starting policy")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the KL divergence of each token")
    kl_in: Literal["loss", "reward"] = Field("loss", description="a term of the loss, or taken off the reward (by k1)")
    entropy: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    importance: Literal["truncate", "mask", "none"] = Field(
        "truncate", description="learner / engine weights outside their bounds: cut to the bound, or the tokens are left out"
    )
    importance_level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="weight of each token, product over the sequence, or its geometric mean"
    )
    importance_cap: float = Field(2.0, gt=0, description="upper bound of learner / engine importance weights")
    importance_floor: float = Field(0.0, ge=0, description="lower bound of them")

    @field_validator("surrogate")
    @classmethod
    def _surrogate_exists(cls, name: str) -> str:
        check_function("surrogate", name)
        return name

    @model_validator(mode="after")
    def _possible(self) -> LossConfig:
        if self.dual_clip and (self.surrogate != "clip" or self.dual_clip <= 1 + self.clip_high):
            raise ValueError("dual_clip needs surrogate=clip and a value above 1 + clip_high")
        if self.surrogate == "reinforce" and self.ratio != "token":
            raise ValueError(f"surrogate reinforce has no ratio, but ratio={self.ratio}")
        if self.kl > 0 and self.kl_in == "reward" and self.kl_estimator != "k1":
            raise ValueError(f"a KL taken off the reward is summed by k1, not {self.kl_estimator}: set kl_estimator=k1")
        if self.importance_floor >= self.importance_cap:
            raise ValueError(f"importance_floor {self.importance_floor} is not below importance_cap {self.importance_cap}")
        return self


class GroupFilterConfig(Section):
    key: Literal["none", "accuracy"] = Field(
        "none", description="accuracy: groups whose rollouts are all right or all wrong are replaced by new questions (DAPO)"
    )
    max_oversampling: float = Field(
        3.0, ge=1, description="questions tried for a batch, as a multiple of rft.prompts_per_step; then it is smaller"
    )


class ReplayConfig(Section):
    capacity: int = Field(0, ge=0, description="rollouts kept to fill up smaller batches (selective sample replay); 0 is off")
    alpha: float = Field(1.0, ge=0, description="a kept rollout is drawn with probability ~ |advantage| ** alpha")
    max_age: int = Field(8, ge=1, description="steps that a rollout is kept")
    max_bytes: int = Field(1_000_000_000, ge=1, description="bytes of views that kept rollouts may hold in the object store")


class RftConfig(Section):
    algorithm: str | None = Field(
        None,
        description=f"named settings of rft.advantage and rft.loss, explicit keys win: {', '.join(ALGORITHMS)}; or your own "
        "package.module:NAME",
    )
    steps: int = Field(40, ge=1, description="batches to learn from")
    epochs: float = Field(0.0, ge=0, description="passes through the questions instead of `steps`; 0: `steps` counts")
    prompts_per_step: int = Field(32, ge=1, description="questions in a step")
    group_size: int = Field(8, ge=1, description="rollouts of a question")
    train_samples: int = Field(
        0, ge=0, description="rollouts of each group that are learnt from; the others only vote (TTRL: 32 of 64); 0 is all"
    )
    choose: Literal["first", "random", "stratified"] = Field(
        "first", description="which ones: the first (TTRL), random ones, or with the spread of rewards that the group has"
    )
    minibatches: int = Field(1, ge=1, description="optimizer steps that a batch is cut into")
    epochs_per_batch: int = Field(1, ge=1, description="passes through a batch; each has `minibatches` optimizer steps")
    max_off_policy_steps: int = Field(0, ge=0, description="steps that rollouts may lag behind the learner; 0 is exact on-policy")
    sampling: SamplingConfig = SamplingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    filter: GroupFilterConfig = GroupFilterConfig()
    replay: ReplayConfig = ReplayConfig()
    evaluate_every: int = Field(0, ge=0, description="steps between held-out evaluations; 0 is never")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """Explicit keys over those of the named algorithm."""
        return fill_in(values, "algorithm", cls._settings_of)

    @classmethod
    def _settings_of(cls, algorithm: str) -> dict[str, Any]:
        settings = algorithm_settings(algorithm)
        if unknown := unknown_keys(cls, settings, "rft."):
            raise BadConfig(f"rft.algorithm: {algorithm} sets unknown configuration key {'; '.join(unknown)}", fix="see `--help`")
        return settings

    @model_validator(mode="after")
    def _enough_samples(self) -> RftConfig:
        if self.train_samples and not self.advantage.min_group <= self.train_samples <= self.group_size:
            raise ValueError(
                f"train_samples {self.train_samples} is not between advantage.min_group {self.advantage.min_group} "
                f"and group_size {self.group_size}"
            )
        return self
