"""Configuration of online evolution: voting, neighbours, KL guard, canary, review, audit and alerts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pixelis.config.base import Section

MIN_LR = 1e-6
"""Minimum learning rate of an online update."""


class VotingConfig(Section):
    strategy: Literal["majority", "weighted", "confidence", "ensemble", "trajectory"] = Field(
        "majority",
        description="majority: most frequent answer of all samples (TTRL); weighted: votes weighted by "
        "confidence, similarity, "
        "success and age; confidence: the most confident vote; ensemble: majority of these three; "
        "trajectory: answers "
        "weighted by how alike the operations of their trajectories are",
    )
    abstain: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "minimum share of the votes for an answer (trajectory: minimum confidence); below it "
            "the agent abstains"
        ),
    )
    collapse: float = Field(
        0.25,
        ge=0,
        lt=1,
        description="stop updates when the answers other than the most frequent one win at most this "
        "fraction as often as "
        "in the first 64 requests; 0: never",
    )
    calibration: tuple[float, float] | None = Field(
        None,
        description="slope and intercept by which confidence becomes the probability of a right answer, "
        "1 / (1 + exp(-(slope x confidence + intercept))), as `pixelis answer --calibrate` fits them to "
        "labelled questions; "
        "unset: confidence as the strategy computes it",
    )
    min_clear: float = Field(
        0.25,
        ge=0,
        le=1,
        description="minimum share of a user's last 64 verdicts that pass the gate; below it nothing is "
        "learnt from that user, "
        "because a policy that is rarely sure also agrees on wrong answers; 0: none",
    )

    @model_validator(mode="after")
    def _rising(self) -> VotingConfig:
        if self.calibration is not None and not self.calibration[0] > 0:
            raise ValueError(
                f"calibration has the slope {self.calibration[0]}: more agreement must mean more confidence"
            )
        return self


class NeighboursConfig(Section):
    k: int = Field(5, ge=0, description="neighbours to retrieve from memory; 0: none")
    min_similarity: float = Field(
        0.95, ge=-1, le=1, description="minimum cosine similarity of a neighbour that votes"
    )


class GuardConfig(Section):
    mode: Literal["auto", "fixed"] = Field(
        "auto", description="auto: adapt beta to the measured KL; fixed: constant beta"
    )
    beta: float = Field(0.01, ge=0, description="initial weight of the KL term (k3) to the starting policy")
    target: float = Field(
        0.05, gt=0, description="target KL; an update that would exceed twice this value is skipped"
    )


class CanaryConfig(Section):
    enabled: bool = Field(True, description="evaluate every candidate before it is served")
    questions: str = Field(
        "cards:?split=validation&seed=11",
        description="labelled questions on which a candidate must not be worse",
    )
    count: int = Field(256, ge=2, description="number of questions")
    traffic: int = Field(
        32,
        ge=0,
        description=(
            "number of confident requests beside them on which a candidate must not be clearly worse; 0: none"
        ),
    )
    traffic_share: float = Field(
        0.0625,
        gt=0,
        le=1,
        description="share of the confident tasks that is held out from learning to be such a request",
    )
    every: int = Field(4, ge=1, description="updates between candidates")
    tolerance: float = Field(
        0.03, ge=0, le=1, description="drop of accuracy that must be ruled out before a candidate is promoted"
    )
    risk: float = Field(
        0.05,
        gt=0,
        le=1,
        description="probability at most of promoting a candidate that dropped by more than the tolerance, "
        "for all candidates "
        "since the last promotion together; 1: no evidence is needed, only a measured drop within the "
        "tolerance",
    )
    watch_s: float = Field(
        300.0, gt=0, description="seconds between evaluations of the served version; a drop rolls it back"
    )
    gpus: float | None = Field(
        None, ge=0, description="GPUs that the generator of the canary reserves; unset: engine.gpus"
    )


class ReviewConfig(Section):
    share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the accepted updates that wait for human review (0.02 in the paper)",
    )
    approve_after_s: float | None = Field(
        None, gt=0, description="seconds after which a waiting update is approved; unset: never"
    )


class AuditConfig(Section):
    rotate_bytes: int = Field(
        100_000_000,
        ge=1000,
        description="size at which a log file is closed and compressed, and a new one is started",
    )
    retention_days: float = Field(
        365.0, gt=0, description="age in days at which a closed log file is deleted"
    )


class ThresholdConfig(Section):
    metric: str = Field(
        description=(
            "health metric, such as update_rate, faiss_failure_rate, mean_kl, queue_size, "
            "memory_usage, p99_latency"
        )
    )
    over: float | None = Field(None, description="alert when the metric is above this value")
    at_most: float | None = Field(None, description="alert when the metric is at or below this value")
    severity: Literal["info", "warning", "critical"] = Field("warning", description="severity of the alert")
    cooldown_s: float = Field(300.0, ge=0, description="seconds before the same alert is repeated")

    @model_validator(mode="after")
    def _one_side(self) -> ThresholdConfig:
        if (self.over is None) == (self.at_most is None):
            raise ValueError("a threshold has either `over` or `at_most`")
        return self


class AlertsConfig(Section):
    every_s: float = Field(10.0, gt=0, description="seconds between checks of the health metrics")
    extra: list[ThresholdConfig] = Field([], description="thresholds in addition to the built-in ones")


class EvolutionConfig(Section):
    enabled: bool = Field(True, description="learn from served traffic")
    cold_start: int = Field(
        100, ge=0, description="experiences in memory before neighbours vote and updates start"
    )
    vote: VotingConfig = VotingConfig()
    neighbours: NeighboursConfig = NeighboursConfig()
    gate: float = Field(
        0.7, ge=0, le=1, description="minimum confidence (inclusive) of a verdict that becomes an update"
    )
    batch: int = Field(16, ge=1, description="update tasks per optimizer step")
    queue: int = Field(
        256, ge=1, description="maximum number of waiting update tasks; beyond it the oldest is dropped"
    )
    max_share_per_user: float = Field(
        0.25,
        gt=0,
        le=1,
        description=(
            "largest share of a user in an update and in a candidate; at least 1/n with n users in "
            "a day; 1: no cap"
        ),
    )
    max_share_per_question: float = Field(
        0.25,
        gt=0,
        le=1,
        description=(
            "largest share of one question and its near-identical copies in an update and in a "
            "candidate; 1: no cap"
        ),
    )
    per_minute: float = Field(60.0, gt=0, description="maximum number of updates per minute")
    objective: Literal["answer", "policy"] = Field(
        "policy",
        description=(
            "policy: rft.loss with group advantages (TTRL); answer: cross-entropy of the samples that agree"
        ),
    )
    train_samples: int = Field(
        2, ge=1, description="objective=answer: maximum number of samples of a task to train on"
    )
    rehearse: int = Field(
        0,
        ge=0,
        description="objective=answer: experiences that each update imitates once more, drawn by priority "
        "from those in memory "
        "of which an update was made; 0: none",
    )
    lr: float = Field(3e-4, ge=MIN_LR, description="maximum learning rate of online updates")
    lr_by: Literal["fixed", "confidence"] = Field(
        "fixed", description="fixed: always lr; confidence: lr x (1 - mean confidence of the batch)"
    )
    ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="decay of the moving average of adapters that is served; 0: serve the newest",
    )
    guard: GuardConfig = GuardConfig()
    canary: CanaryConfig = CanaryConfig()
    review: ReviewConfig = ReviewConfig()
    audit: AuditConfig = AuditConfig()
    alerts: AlertsConfig = AlertsConfig()

    @model_validator(mode="after")
    def _ordered(self) -> EvolutionConfig:
        if self.rehearse and self.objective != "answer":
            raise ValueError("evolution.rehearse imitates earlier answers: set evolution.objective=answer")
        return self
