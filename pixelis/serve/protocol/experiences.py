"""Bodies of feedback and of stored experiences."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from pixelis.records import Experience
from pixelis.serve.protocol.errors import ID, MAX_ANSWER_CHARS, MAX_COMMENT_CHARS, ApiError, PlainText, StrictModel


class FeedbackRequest(StrictModel):
    """Body of ``POST /v1/feedback``: whether a stored answer is correct, the correct answer, a comment; at least one of them."""

    experience_id: str = Field(pattern=ID)
    correct: bool | None = None
    answer: PlainText | None = Field(None, min_length=1, max_length=MAX_ANSWER_CHARS)
    comment: PlainText = Field("", max_length=MAX_COMMENT_CHARS)

    @model_validator(mode="after")
    def _not_empty(self) -> FeedbackRequest:
        if self.correct is None and self.answer is None and not self.comment.strip():
            raise ApiError(400, "feedback needs `correct`, an `answer` or a `comment`", "missing_parameter", "correct")
        return self


class FeedbackReply(BaseModel):
    """``count`` is the number of feedback entries of the experience."""

    object: Literal["feedback"] = "feedback"
    experience_id: str
    count: int


class ExperienceReply(BaseModel):
    """A stored experience without token ids; ``pictures`` are data URLs by image id."""

    object: Literal["experience"] = "experience"
    experience: Experience
    pictures: dict[str, str] = {}


class ExperienceList(BaseModel):
    """Experiences without token ids and pictures, newest first. ``next_before`` is the query ``before`` of the next page."""

    object: Literal["list"] = "list"
    data: list[Experience]
    next_before: str | None


class DeletionReply(BaseModel):
    object: Literal["deleted"] = "deleted"
    deleted: int
    ids: list[str]
