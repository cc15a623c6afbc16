"""Bodies of the episode routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from pixelis.protocol.errors import (
    MAX_ANSWER_CHARS,
    MAX_COMMENT_CHARS,
    MAX_NAME_CHARS,
    PlainText,
    StrictModel,
)
from pixelis.protocol.responses import Metadata
from pixelis.records.trajectory import MAX_TERMS, TermName

MAX_ANSWERS = 64
MAX_SAMPLES = 256
MAX_REWARD = 1e6
ScorerName = TermName
"""Of a scorer of ours: a client must not name a function that we would import and call."""
MAX_EXPIRES_S = 86_400
MAX_WAIT_S = 300

Name = Annotated[PlainText, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Reward = Annotated[float, Field(allow_inf_nan=False, ge=-MAX_REWARD, le=MAX_REWARD)]
Status = Literal["open", "rewarded", "failed", "expired", "unrewarded"]
"""``unrewarded``: it ended, and neither a reward nor the vote decided."""


class EpisodeRequest(StrictModel):
    """Body of ``POST /v1/episodes``: by default the first user message is the question.

    A verifier compares with the ``answers``. The ``samples`` episodes of a ``group`` share an advantage.
    """

    question: PlainText | None = Field(None, max_length=MAX_COMMENT_CHARS)
    answers: list[Annotated[PlainText, Field(max_length=MAX_ANSWER_CHARS)]] | None = Field(
        None, max_length=MAX_ANSWERS, fail_fast=True
    )
    scorer: ScorerName | None = None
    group: Name | None = None
    samples: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    expires_s: Number | None = Field(None, gt=0, le=MAX_EXPIRES_S)
    metadata: Metadata | None = None


class NextEpisodeRequest(StrictModel):
    """Body of ``POST /v1/episodes/next``, which waits for a question; 204 if there is none in ``wait_s``."""

    wait_s: Number = Field(30.0, ge=0, le=MAX_WAIT_S)


class EpisodeReply(BaseModel):
    """An open episode. An OpenAI client uses its ``base_url``. ``expires_at`` is a Unix time in seconds."""

    id: str
    object: Literal["episode"] = "episode"
    base_url: str
    group: str
    expires_at: float
    status: Status = "open"


class NextEpisodeReply(EpisodeReply):
    """An episode with its question, which has marks ``<image>`` where pictures are shown, as data URLs."""

    question: str
    images: list[str] = Field(default_factory=list)
    metadata: dict[str, Any] = Field(default_factory=dict)


class RewardRequest(StrictModel):
    """Body of ``POST /v1/episodes/{id}/reward``, which ends an episode.

    One of ``reward``, ``terms`` by name, and the name of a ``verifier``, which scores ``answer``, by default
    the branch's. ``branch``: the one that is rewarded, by default the last.
    """

    reward: Reward | None = None
    terms: Annotated[dict[TermName, Reward], Field(min_length=1, max_length=MAX_TERMS)] | None = None
    verifier: ScorerName | None = None
    answer: PlainText | None = Field(None, max_length=MAX_ANSWER_CHARS)
    branch: Name | None = None

    @model_validator(mode="after")
    def _one_reward(self) -> RewardRequest:
        if sum(value is not None for value in (self.reward, self.terms, self.verifier)) != 1:
            raise PydanticCustomError("one_reward", "send one of `reward`, `terms` and `verifier`")
        if self.answer is not None and self.verifier is None:
            raise PydanticCustomError("one_reward", "`answer` is for a `verifier`")
        return self


class RewardReply(BaseModel):
    """The same for a repeated request: the first reward counts."""

    id: str
    status: Status
    branch: str
    reward: float | None


class FailRequest(StrictModel):
    """Body of ``POST /v1/episodes/{id}/fail``: the agent failed, which is no reward of 0."""

    cause: PlainText = Field(min_length=1, max_length=MAX_COMMENT_CHARS)


class EpisodeStatus(EpisodeReply):
    """Reply of ``GET /v1/episodes/{id}``. ``branches`` have the number of the policy's turns by name."""

    branches: dict[str, int] = Field(default_factory=dict)
    reward: float | None = None
    cause: str | None = None
