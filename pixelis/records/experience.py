"""Served episodes: votes, verdicts, experiences, update tasks and policy versions."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

from pydantic import Field

from pixelis.records.question import Question, Record, new_id
from pixelis.records.trajectory import Trajectory


class Vote(Record):
    """An answer with its weight; ``id`` is that of the trajectory or, for a neighbour, of the experience.

    ``elected``: the vote is for the verdict's answer, maybe in another spelling.
    """

    answer: str | None
    weight: float = 1.0
    source: Literal["sample", "neighbour"] = "sample"
    id: str = ""
    confidence: float | None = None
    similarity: float | None = None
    elected: bool = False


class Verdict(Record):
    """The result of a vote with its provenance; ``answer`` None means abstention, ``confidence`` is 0..1.

    The reason ``rewarded``: a client rewarded the episode, whose trajectory has the ``outcome``.

    ``self_answer``: the first sample's answer. ``neighbours``: number of retrieved experiences, of which the
    compatible ones are in ``votes``. ``partial``: some memory shards did not answer. ``answer_weights``: by
    class of equal answers. ``strategies``: the answer of each strategy of an ensemble.
    """

    answer: str | None
    confidence: float
    strategy: str
    votes: list[Vote] = Field(default_factory=list)
    reason: str = ""
    self_answer: str | None = None
    neighbours: int = 0
    partial: bool = False
    answer_weights: dict[str, float] = Field(default_factory=dict)
    strategies: dict[str, str | None] = Field(default_factory=dict)


class Feedback(Record):
    correct: bool | None = None
    answer: str | None = None
    comment: str = ""
    created_at: float = 0.0


def initial_priority(fields: dict[str, Any]) -> float:
    """.4 (1 - confidence) + .4 |reward|, at least .01 (Pixelis' experience buffer, arXiv 2603.25091).

    Its third part, recency, is 0 for a new experience.
    """
    return max(0.01, 0.4 * (1 - fields["verdict"].confidence) + 0.4 * abs(fields["trajectory"].reward or 0.0))


class Experience(Record):
    """A served episode as stored in memory: text redacted, pictures stored separately, no data URLs.

    ``user`` is a pseudonym. A retrieval is among ``successes`` if the verdict agrees with this experience;
    each retrieval id counts once. ``response``: parameters and usage of a request that ``/v1/responses``
    answered.
    """

    id: str = Field(default_factory=lambda: new_id("exp"))
    question: Question
    trajectory: Trajectory
    verdict: Verdict
    policy_version: int
    created_at: float
    user: str | None = None
    status: Literal["pending", "processed", "failed", "archived"] = "pending"
    priority: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(default_factory=initial_priority)
    cold_start: bool = False
    response: dict[str, Any] | None = None
    feedback: list[Feedback] = Field(default_factory=list)
    retrievals: int = 0
    successes: int = 0


class Neighbour(Record):
    """A retrieved experience and its similarity to the query: cosine or negative distance."""

    experience: Experience
    similarity: float


class UpdateTask(Record):
    """A learner task from traffic: trajectories scored against the *pseudo-label*, never against a truth.

    ``user`` is the pseudonym of who asked, empty if unknown. ``trace``: W3C ``traceparent`` of the request.
    ``experiences``: ids by trajectory, of trajectories that are experiences of their own; ``experience_id`` is
    then that of one with the label.
    """

    id: str = Field(default_factory=lambda: new_id("task"))
    question_id: str
    trajectories: list[Trajectory]
    pseudo_label: str
    confidence: float
    created_at: float
    experience_id: str = ""
    experiences: dict[str, str] = Field(default_factory=dict)
    user: str = ""
    trace: str = ""

    @property
    def experience_ids(self) -> set[str]:
        return {self.experience_id, *self.experiences.values()} - {""}

    @property
    def policy_versions(self) -> set[int]:
        return {trajectory.policy_version for trajectory in self.trajectories}


class VersionStatus(enum.StrEnum):
    CANDIDATE = "candidate"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    UNLEARNT = "unlearnt"


class PolicyVersion(Record):
    version: Annotated[int, Field(ge=0)]
    parent: int | None = None
    sha256: str = ""
    bytes: int = 0
    status: VersionStatus = VersionStatus.CANDIDATE
    pinned: bool = False
    stage: str = ""
    step: int = 0
    created_at: float = 0.0
    metrics: dict[str, float] = Field(default_factory=dict)
