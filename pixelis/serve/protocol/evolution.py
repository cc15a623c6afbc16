"""Bodies of the routes that inspect and control online evolution, and of the review queue."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pixelis.protocol.errors import (
    MAX_ANSWER_CHARS,
    MAX_COMMENT_CHARS,
    MAX_NAME_CHARS,
    ApiError,
    PlainText,
    StrictModel,
)
from pixelis.records import PolicyVersion

MAX_VERSION = 2**31


class EmptyRequest(StrictModel):
    """A body without fields."""


class PromoteRequest(StrictModel):
    """Body of ``POST /v1/evolution/promote``. ``force`` skips the canary, which the audit log records."""

    version: int = Field(ge=0, lt=MAX_VERSION)
    force: bool = False


class RollbackRequest(StrictModel):
    """Body of ``POST /v1/evolution/rollback``; the default is the previous promoted version."""

    version: int | None = Field(None, ge=0, lt=MAX_VERSION)


class EvolutionReply(BaseModel):
    """Reply of the routes that control evolution: the action's result, and the status after it."""

    object: Literal["evolution.order"] = "evolution.order"
    order: Literal["pause", "resume", "promote", "rollback"]
    result: Any
    status: dict[str, Any]


class EvolutionStatus(BaseModel):
    """Reply of ``GET /v1/evolution``.

    ``canary`` are the judgements, oldest first; ``audit`` and ``alerts`` the latest. ``learnt`` are version,
    time and largest shares of recent candidates.
    """

    object: Literal["evolution.status"] = "evolution.status"
    enabled: bool
    read_only: bool = False
    policy_version: int | None
    updates: int
    queue: int
    counts: dict[str, int]
    status: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    versions: list[PolicyVersion] = []
    canary: list[dict[str, Any]] = []
    learnt: list[dict[str, Any]] = []
    audit: list[Any] = []
    alerts: list[dict[str, Any]] = []


class ReviewList(BaseModel):
    """Updates in the review queue, without pictures."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]


class ReviewReply(BaseModel):
    """An update in the review queue; ``pictures`` are data URLs by image id of its trajectory."""

    model_config = ConfigDict(extra="allow")
    object: Literal["review"] = "review"
    pictures: dict[str, str]


class ReviewDecision(StrictModel):
    """Body of ``POST /v1/review/{id}``. ``answer`` replaces the label of an approved update."""

    decision: Literal["approve", "reject"]
    answer: PlainText | None = Field(None, min_length=1, max_length=MAX_ANSWER_CHARS)
    comment: PlainText = Field("", max_length=MAX_COMMENT_CHARS)
    reviewer: PlainText = Field("", max_length=MAX_NAME_CHARS)

    @model_validator(mode="after")
    def _answer_only_if_approved(self) -> ReviewDecision:
        if self.answer is not None and self.decision == "reject":
            message = "a rejected update is not learnt from: leave `answer` out"
            raise ApiError(400, message, "invalid_value", "answer")
        return self


class DecisionReply(BaseModel):
    """``result`` has the new state of the update and whether it was queued for the learner."""

    object: Literal["review.decision"] = "review.decision"
    id: str
    decision: Literal["approve", "reject"]
    result: dict[str, Any]
