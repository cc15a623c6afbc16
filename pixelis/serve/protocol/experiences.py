"""Bodies of feedback and of stored experiences."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from pixelis.protocol.errors import (
    ID,
    MAX_ANSWER_CHARS,
    MAX_COMMENT_CHARS,
    MAX_NAME_CHARS,
    ApiError,
    PlainText,
    StrictModel,
)
from pixelis.records import Experience
from pixelis.serve.keys import NAME

MAX_FOUND = 50
"""Most results of a search."""


class FeedbackRequest(StrictModel):
    """Body of ``POST /v1/feedback``: at least one of ``correct``, ``answer`` and ``comment``."""

    experience_id: str = Field(pattern=ID)
    correct: bool | None = None
    answer: PlainText | None = Field(None, min_length=1, max_length=MAX_ANSWER_CHARS)
    comment: PlainText = Field("", max_length=MAX_COMMENT_CHARS)

    @model_validator(mode="after")
    def _not_empty(self) -> FeedbackRequest:
        if self.correct is None and self.answer is None and not self.comment.strip():
            message = "feedback needs `correct`, an `answer` or a `comment`"
            raise ApiError(400, message, "missing_parameter", "correct")
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


class ExperienceSearch(StrictModel):
    """Body of ``POST /v1/experiences/search``: a ``text``, an ``image`` (data URL), or both.

    Only experiences with the words of the ``text`` are found. ``user`` and ``key`` restrict the search as in
    ``GET /v1/experiences``.
    """

    text: PlainText = ""
    image: str | None = None
    k: int = Field(10, ge=1, le=MAX_FOUND)
    user: PlainText | None = Field(None, max_length=MAX_NAME_CHARS)
    key: str | None = Field(None, pattern=NAME)

    @model_validator(mode="after")
    def _not_empty(self) -> ExperienceSearch:
        if not self.text.strip() and self.image is None:
            raise ApiError(400, "a search needs a `text`, an `image` or both", "missing_parameter", "text")
        return self


class FoundExperience(BaseModel):
    """An experience without token ids and pictures; ``similarity`` is the cosine to what was searched for."""

    experience: Experience
    similarity: float


class FoundExperiences(BaseModel):
    """Experiences, the most similar first. ``partial``: a part of the memory did not answer."""

    object: Literal["list"] = "list"
    data: list[FoundExperience]
    partial: bool


class ExperienceList(BaseModel):
    """Experiences, newest first. ``next_before`` is the query ``before`` of the next page."""

    object: Literal["list"] = "list"
    data: list[Experience]
    next_before: str | None


class DeletionReply(BaseModel):
    """Reply of every deletion of experiences."""

    object: Literal["deleted"] = "deleted"
    deleted: int
    ids: list[str]
