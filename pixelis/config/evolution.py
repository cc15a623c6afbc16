"""Configuration of online evolution: voting, neighbours, KL guard, canary, review, audit and alerts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pixelis.config.base import Section, Share

MIN_LR = 1e-6
"""Minimum learning rate of an online update."""


class VotingConfig(Section):
    strategy: Literal["majority", "weighted", "confidence", "ensemble", "trajectory"] = "majority"
    """majority: most frequent answer of all samples (TTRL); weighted: votes weighted by confidence,
    similarity, success and age; confidence: the most confident vote; ensemble: majority of these three;
    trajectory: answers weighted by how alike the operations of their trajectories are"""
    abstain: Share = 0.0
    """minimum share of the votes (trajectory: minimum confidence), below which the agent abstains"""
    calibration: tuple[float, float] | None = None
    """slope and intercept by which confidence becomes the probability of a right answer, 1 / (1 + exp(-(slope
    x confidence + intercept))), as `pixelis answer --calibrate` fits them to labelled questions; unset:
    confidence as the strategy computes it"""
    min_clear: Share = 0.25
    """minimum share of a user's last 64 verdicts that pass the gate; below it nothing is learnt from that
    user, because a policy that is rarely sure also agrees on wrong answers; 0: none"""

    @model_validator(mode="after")
    def _rising(self) -> VotingConfig:
        if self.calibration is not None and not self.calibration[0] > 0:
            raise ValueError(
                f"calibration has the slope {self.calibration[0]}: more agreement must mean more confidence"
            )
        return self


class NeighboursConfig(Section):
    k: NonNegativeInt = 5
    """neighbours to retrieve from memory; 0: none"""
    min_similarity: float = Field(0.95, ge=-1, le=1)
    """minimum cosine similarity of a neighbour that votes"""
    min_users: PositiveInt = 3
    """users whose experiences must agree to vote on another user's request of the same key"""


class GuardConfig(Section):
    mode: Literal["auto", "fixed"] = "auto"
    """auto: adapt beta to the measured KL; fixed: constant beta"""
    beta: NonNegativeFloat = 0.01
    """initial weight of the KL term (k3) to the starting policy"""
    target: PositiveFloat = 0.05
    """target KL; an update that would exceed twice this value is skipped"""


class CanaryConfig(Section):
    enabled: bool = True
    """evaluate every candidate before it is served"""
    questions: str = "cards:?split=validation&seed=11"
    """labelled questions on which a candidate must not be worse"""
    count: int = Field(256, ge=2)
    """number of questions"""
    traffic: NonNegativeInt = 32
    """number of confident requests beside them on which a candidate must not be clearly worse; 0: none"""
    traffic_share: float = Field(0.0625, gt=0, le=1)
    """share of the confident tasks that is held out from learning to be such a request"""
    every: PositiveInt = 4
    """updates between candidates"""
    tolerance: Share = 0.03
    """drop of accuracy that must be ruled out before a candidate is promoted"""
    risk: float = Field(0.05, gt=0, le=1)
    """probability at most of promoting a candidate that dropped by more than the tolerance, for all
    candidates since the last promotion together; 1: no evidence is needed, only a measured drop within the
    tolerance"""
    min_use: float | None = Field(None, gt=0)
    """mean causal use in nats of the calls of a candidate below which it is refused, because its answers no
    longer depend on what it looks at (docs/looking.md); null: not measured"""
    watch_s: PositiveFloat = 300.0
    """seconds between evaluations of the served version; a drop rolls it back"""
    gpus: float | None = Field(None, ge=0)
    """GPUs that the generator of the canary reserves; unset: engine.gpus"""


class ReviewConfig(Section):
    share: Share = 0.0
    """share of the accepted updates that wait for human review (0.02 in the paper)"""
    approve_after_s: float | None = Field(None, gt=0)
    """seconds after which a waiting update is approved; unset: never"""


class AuditConfig(Section):
    rotate_bytes: int = Field(100_000_000, ge=1000)
    """size at which the log continues in a new file"""
    retention_days: PositiveFloat = 365.0
    """age in days at which a closed log file is deleted"""


class ThresholdConfig(Section):
    metric: str
    """health metric: update_rate, faiss_failure_rate, mean_kl, queue_size, memory_usage, p99_latency, ..."""
    over: float | None = None
    """alert when the metric is above this value"""
    at_most: float | None = None
    """alert when the metric is at or below this value"""
    severity: Literal["info", "warning", "critical"] = "warning"
    """severity of the alert"""
    cooldown_s: NonNegativeFloat = 300.0
    """seconds before the same alert is repeated"""

    @model_validator(mode="after")
    def _one_side(self) -> ThresholdConfig:
        if (self.over is None) == (self.at_most is None):
            raise ValueError("a threshold has either `over` or `at_most`")
        return self


class AlertsConfig(Section):
    every_s: PositiveFloat = 10.0
    """seconds between checks of the health metrics"""
    extra: list[ThresholdConfig] = Field([])
    """thresholds in addition to the built-in ones"""


class EvolutionConfig(Section):
    enabled: bool = True
    """learn from served traffic"""
    cold_start: NonNegativeInt = 100
    """experiences in memory before neighbours vote and updates start"""
    vote: VotingConfig = VotingConfig()
    neighbours: NeighboursConfig = NeighboursConfig()
    gate: Share = 0.7
    """minimum confidence (inclusive) of a verdict that becomes an update"""
    batch: PositiveInt = 16
    """update tasks per optimizer step"""
    queue: PositiveInt = 256
    """maximum number of waiting update tasks; beyond it the oldest is dropped"""
    max_share_per_user: float = Field(0.25, gt=0, le=1)
    """largest share of a user in an update or a candidate; at least 1/n with n users in a day; 1: no cap"""
    max_share_per_question: float = Field(0.25, gt=0, le=1)
    """largest share of a question with near-identical copies in an update or a candidate; 1: no cap"""
    per_minute: PositiveFloat = 60.0
    """maximum number of updates per minute"""
    objective: Literal["answer", "policy"] = "policy"
    """policy: rft.loss with group advantages (TTRL); answer: cross-entropy of the samples that agree"""
    train_samples: PositiveInt = 2
    """objective=answer: maximum number of samples of a task to train on"""
    rehearse: NonNegativeInt = 0
    """objective=answer: experiences that each update imitates once more, drawn by priority from those in
    memory of which an update was made; 0: none"""
    words: bool = False
    """objective=answer: learn what the policy answers once it is told the `comment` of a feedback; the memory
    then keeps pictures as they were sent"""
    lr: float = Field(3e-4, ge=MIN_LR)
    """maximum learning rate of online updates"""
    lr_by: Literal["fixed", "confidence"] = "fixed"
    """fixed: always lr; confidence: lr x (1 - mean confidence of the batch)"""
    ema: float = Field(0.0, ge=0, lt=1)
    """decay of the moving average of adapters that is served; 0: serve the newest"""
    unlearn_s: NonNegativeFloat | None = None
    """seconds after a deletion at which the updates since what was deleted are repeated without it, so that
    the weights lose it too; updates are then recorded for memory.retention_days; unset: weights keep it"""
    guard: GuardConfig = GuardConfig()
    canary: CanaryConfig = CanaryConfig()
    review: ReviewConfig = ReviewConfig()
    audit: AuditConfig = AuditConfig()
    alerts: AlertsConfig = AlertsConfig()

    @model_validator(mode="after")
    def _ordered(self) -> EvolutionConfig:
        if self.rehearse and self.objective != "answer":
            raise ValueError("evolution.rehearse imitates earlier answers: set evolution.objective=answer")
        if self.words and self.objective != "answer":
            raise ValueError(
                "evolution.words imitates what a told policy does: set evolution.objective=answer"
            )
        return self
