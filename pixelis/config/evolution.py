"""Configuration of online evolution: voting, neighbours, KL guard, canary, review, audit and alerts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pixelis.config.base import Section


class VotingConfig(Section):
    strategy: Literal["majority", "weighted", "confidence", "ensemble"] = Field(
        "majority",
        description="majority: share of all samples (TTRL); weighted: by confidence, similarity, success, age; confidence: the "
        "best single vote; ensemble: these three vote",
    )
    min_votes: int = Field(3, ge=1, description="votes below which agreement is no evidence")
    abstain: float = Field(0.0, ge=0, le=1, description="share of the votes below which there is no answer")
    collapse: float = Field(
        0.25,
        ge=0,
        lt=1,
        description="updates stop when all answers but the most common win at most this times as often as they did; 0 is never",
    )
    collapse_window: int = Field(64, ge=16, description="requests that are compared for that: the first ones, and the last")


class NeighboursConfig(Section):
    k: int = Field(5, ge=0, description="neighbours looked up in memory; 0 is none")
    min_similarity: float = Field(0.95, ge=-1, le=1, description="cosine below which a neighbour has no vote")
    decay_hours: float = Field(24.0, gt=0, description="age at which a neighbour's weight has fallen to 1/e")


class GuardConfig(Section):
    mode: Literal["auto", "fixed"] = Field("auto", description="auto: beta follows the measured KL; fixed: it stays")
    beta: float = Field(0.01, ge=0, description="weight of the k3 KL term to the starting policy, at first")
    min_beta: float = Field(1e-4, gt=0, description="auto: least beta")
    max_beta: float = Field(1.0, gt=0, description="auto: largest beta")
    target: float = Field(0.05, gt=0, description="KL that beta steers to; an update that would pass twice this is skipped")
    tolerance: float = Field(0.01, ge=0, description="distance from the target within which beta stays")

    @model_validator(mode="after")
    def _ordered(self) -> GuardConfig:
        if self.min_beta > self.max_beta:
            raise ValueError(f"min_beta {self.min_beta} is above max_beta {self.max_beta}")
        return self


class CanaryConfig(Section):
    enabled: bool = Field(True, description="judge every candidate before it may serve")
    questions: str = Field("cards:?split=validation&seed=11", description="labelled questions a candidate must not fall on")
    count: int = Field(128, ge=2, description="questions asked")
    every: int = Field(4, ge=1, description="updates between candidates")
    tolerance: float = Field(0.02, ge=0, le=1, description="fall of accuracy that is no reason to refuse")
    sigma: float = Field(2.0, gt=0, description="a fall beyond this many standard errors of the paired difference is one, too")
    watch_s: float = Field(300.0, gt=0, description="seconds between looks at the served version; a fall rolls it back")
    timeout_s: float = Field(300.0, gt=0, description="seconds a question may take, restarts of the generator included")
    cpus: float = Field(0.25, ge=0, description="CPUs of the generator that answers the canary questions")
    gpus: float = Field(0, ge=0, description="GPUs of the generator that answers the canary questions")


class ReviewConfig(Section):
    share: float = Field(0.0, ge=0, le=1, description="share of gated updates that wait for a person (the paper's is .02)")
    approve_after_s: float | None = Field(None, gt=0, description="seconds after which a waiting update is taken; none: never")
    limit: int = Field(1000, ge=1, description="most updates that wait; more go their automatic way")


class AuditConfig(Section):
    rotate_bytes: int = Field(
        100_000_000, ge=1000, description="size at which a log file is closed, compressed and followed by another"
    )
    retention_days: float = Field(365.0, gt=0, description="age at which a closed log file is removed")


class ThresholdConfig(Section):
    metric: str = Field(
        description="health metric, such as update_rate, faiss_failure_rate, mean_kl, queue_size, memory_usage, p99_latency"
    )
    over: float | None = Field(None, description="alert above")
    at_most: float | None = Field(None, description="alert at or below")
    severity: Literal["info", "warning", "critical"] = Field("warning", description="how loud")
    cooldown_s: float = Field(300.0, ge=0, description="seconds in which the same alert is not repeated")

    @model_validator(mode="after")
    def _one_side(self) -> ThresholdConfig:
        if (self.over is None) == (self.at_most is None):
            raise ValueError("a threshold has either `over` or `at_most`")
        return self


class AlertsConfig(Section):
    webhook_env: str = Field(
        "PIXELIS_ALERT_WEBHOOK", description="environment variable with the URL that alerts are posted to; unset: none"
    )
    every_s: float = Field(10.0, gt=0, description="seconds between looks at the health metrics")
    extra: list[ThresholdConfig] = Field([], description="thresholds beside the built-in ones")


class EvolutionConfig(Section):
    enabled: bool = Field(True, description="learn from served traffic")
    cold_start: int = Field(100, ge=0, description="experiences in memory before neighbours are asked and updates made")
    vote: VotingConfig = VotingConfig()
    neighbours: NeighboursConfig = NeighboursConfig()
    gate: float = Field(0.7, ge=0, le=1, description="least confidence (inclusive) of a verdict that becomes an update")
    batch: int = Field(16, ge=1, description="update tasks in one optimizer step")
    queue: int = Field(256, ge=1, description="update tasks that wait; the oldest is dropped beyond")
    per_minute: float = Field(60.0, gt=0, description="most updates in a minute")
    objective: Literal["answer", "policy"] = Field(
        "policy",
        description="policy: rft.loss with group advantages (TTRL); answer: the elected answer is learnt in every sample's own "
        "episode, and the calls of the samples that gave it with weight call_weight",
    )
    call_weight: float = Field(
        0.1, ge=0, description="objective=answer: weight of the tokens before the last turn where it agreed"
    )
    lr: float = Field(3e-4, gt=0, description="largest learning rate of online updates")
    lr_min: float = Field(1e-6, gt=0, description="least learning rate of online updates")
    lr_by: Literal["fixed", "confidence"] = Field(
        "fixed", description="fixed: lr; confidence: lr x (1 - mean confidence of the batch)"
    )
    ema: float = Field(0.0, ge=0, lt=1, description="decay of the average of adapters that is served; 0 serves the newest")
    guard: GuardConfig = GuardConfig()
    canary: CanaryConfig = CanaryConfig()
    review: ReviewConfig = ReviewConfig()
    audit: AuditConfig = AuditConfig()
    alerts: AlertsConfig = AlertsConfig()

    @model_validator(mode="after")
    def _ordered(self) -> EvolutionConfig:
        if self.lr_min > self.lr:
            raise ValueError(f"evolution.lr_min {self.lr_min} is above evolution.lr {self.lr}")
        return self
