"""What travels between the rooms: one versioned schema for synthesis, SFT, RFT, memory, serving and logs.

Records hold references, never pixels or tensors: an image is named by its id inside a trajectory (``img0``, ``obs1``), a
URI or content hash, and its size. They serialise to JSON lines with ``model_dump_json`` and come back with
``model_validate_json``; nothing here imports torch or ray.
"""

from __future__ import annotations

import enum
import pickle
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

SCHEMA_VERSION = 1

Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 with x0 < x1 and y0 < y1, each 0..1 of a *named* observation."""

Point = tuple[float, float]
"""x, y, each 0..1 of a *named* observation."""

Coordinates = Literal["thousand", "pixels", "unit"]
"""The scale in which a model writes places: 0..1000, pixels of the view, or 0..1."""


def new_id(prefix: str) -> str:
    """A fresh id such as ``traj_3f9c…``."""
    return f"{prefix}_{uuid.uuid4().hex[:16]}"


class Record(BaseModel):
    """Base of all records: unknown keys are errors, so that a schema drift is seen where it happens."""

    model_config = ConfigDict(extra="forbid", validate_assignment=False, ser_json_inf_nan="constants")


class Media(Record):
    """A picture or clip that a question brings along.

    ``uri`` is a file path, a ``data:`` URL or a ``cards:`` name (the embedded picture world). A clip may also be a list of
    pictures, ``frames``, shown ``fps`` a second. Sizes in pixels; ``None`` until somebody decoded it.
    """

    id: str
    uri: str = ""
    kind: Literal["image", "video"] = "image"
    frames: list[str] | None = None
    fps: Annotated[float, Field(gt=0)] = 1.0
    width: int | None = None
    height: int | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Media:
        if bool(self.uri) == bool(self.frames) or (self.frames and self.kind != "video"):
            raise ValueError("media has a `uri`, or is a video with a list of `frames`")
        return self


class Region(Record):
    """An annotated thing in a picture, or in one frame of a clip (``frame`` from 0).

    Places are 0..1 of ``media``. ``mask`` is a run-length code as COCO writes it, of the full resolution; ``outline`` a list of
    polygons. Regions of one thing in several frames share a ``track``.
    """

    id: str
    label: str
    box: Box
    media: str = "img0"
    mask: dict[str, Any] | None = None
    outline: list[list[Point]] | None = None
    frame: int | None = None
    track: str | None = None
    attributes: dict[str, Any] = Field(default_factory=dict)


class Line(Record):
    """Annotated writing: a word, a line or a paragraph and where it stands (0..1 of ``media``), if that is known."""

    text: str
    box: Box | None = None
    media: str = "img0"
    frame: int | None = None
    level: Literal["word", "line", "paragraph"] = "line"


class Event(Record):
    """Something annotated to happen in a clip from ``start`` to ``end``, in seconds."""

    text: str
    start: Annotated[float, Field(ge=0)]
    end: Annotated[float, Field(ge=0)]
    media: str = "vid0"


class Relation(Record):
    """Two annotated regions, by id, and what holds between them."""

    subject: str
    predicate: str
    object: str


class Annotations(Record):
    """What is known about a question's media: the ground that demonstrations are made from. A policy never sees it."""

    regions: list[Region] = Field(default_factory=list)
    lines: list[Line] = Field(default_factory=list)
    events: list[Event] = Field(default_factory=list)
    relations: list[Relation] = Field(default_factory=list)
    captions: list[str] = Field(default_factory=list)


class Question(Record):
    """One thing to answer. ``answers`` are accepted truths; ``None`` means unlabelled.

    A reader of pictures that nobody has asked about yet leaves ``question`` empty and fills in ``annotations``.
    """

    id: str
    question: str
    media: list[Media] = Field(default_factory=list)
    answers: list[str] | None = None
    scorer: str = "exact"
    task: str = "qa"
    split: str = "train"
    meta: dict[str, Any] = Field(default_factory=dict)
    annotations: Annotations | None = None


class Action(Record):
    """One pixel operation the policy asked for.

    ``arguments`` are canonical: coordinates 0..1 of ``target`` (a media or observation id).
    """

    op: str
    target: str = "img0"
    arguments: dict[str, Any] = Field(default_factory=dict)


class ImageView(Record):
    """An image as the policy saw it: where it comes from and the size it was shown at.

    ``box`` is relative to ``parent``; a question's own picture has neither. A frame of a clip has the clip as ``parent``, its
    number from 0 as ``frame`` and its ``time`` in seconds; a ``box`` is then of the frame. ``source_size`` is the size in pixels
    of the full-resolution region, ``view_size`` that of the resized view; both (width, height).
    """

    id: str
    uri: str = ""
    parent: str | None = None
    frame: int | None = None
    time: float | None = None
    box: Box | None = None
    source_size: tuple[int, int] = (0, 0)
    view_size: tuple[int, int] = (0, 0)


class Observation(Record):
    """What an operation gave back. ``id`` is assigned on success only; ``seconds`` is its cost.

    ``text`` is what the policy reads, its coordinates in the policy's own scale. ``data`` is for rewards, evaluation and pages:
    plain values, with places 0..1 of the question's own picture or of a frame of its clip.
    """

    status: Literal["ok", "error"]
    id: str | None = None
    text: str = ""
    code: str | None = None
    images: list[ImageView] = Field(default_factory=list)
    data: dict[str, Any] = Field(default_factory=dict)
    seconds: float = 0.0


class Turn(Record):
    """A contiguous run of tokens by one author.

    ``tokens`` are exact ids (image pads expanded). ``log_probs`` (behaviour log-probabilities, natural log, under the
    sampling distribution) has one entry per token of a policy turn and is empty for all others. The loss covers exactly the
    policy turns, but those of a demonstration that ``learn`` leaves out.
    """

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    tokens: list[int] = Field(default_factory=list)
    log_probs: list[float] = Field(default_factory=list)
    images: list[str] = Field(default_factory=list)
    action: Action | None = None
    observation: Observation | None = None
    error: str | None = None
    learn: bool = True

    @property
    def is_policy(self) -> bool:
        """True when the policy generated these tokens."""
        return self.role == "assistant"


class Step(Record):
    """One assistant turn of a demonstration: an operation or the answer, after an optional thought.

    Written flat in files (``{"op": "zoom_in", "box": [...]}``): keys that are no field are arguments of the operation. Without a
    ``target`` it is about the first picture or clip. ``learn`` False keeps the turn in the context and out of the loss: a mistake
    that the next turn mends. ``observation`` is what executing the operation gave when the demonstration was made.
    """

    think: str | None = None
    op: str | None = None
    target: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    answer: str | None = None
    learn: bool = True
    observation: Observation | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "op" not in values:
            return values
        flat = {key: value for key, value in values.items() if key not in cls.model_fields}
        if flat and values.get("arguments"):
            raise ValueError(f"arguments stand in `arguments` or beside `op` ({', '.join(flat)}), not both")
        kept = {key: value for key, value in values.items() if key in cls.model_fields}
        return {**kept, "arguments": flat} if flat else kept

    @model_validator(mode="after")
    def _one_thing(self) -> Step:
        if (self.op is None) == (self.answer is None):
            raise ValueError("a turn has an `op` or an `answer`")
        return self


class Provenance(Record):
    """Where a demonstration comes from: its source and row, how it was made, and what was done to it on purpose."""

    source: str
    original_id: str
    method: str
    version: str = ""
    parent: str | None = None
    injected: dict[str, Any] = Field(default_factory=dict)
    writer: str | None = None


SampleKind = Literal["golden", "outcome_negative", "trap_perceptual", "trap_logical", "self_correction"]
Level = Literal["simple", "medium", "hard"]


class Demonstration(Question):
    """A question with the turns of an assistant that works on it: a Chain-of-Thought-Action sample, a line of a file.

    ``turns`` end with an answer. ``kind`` golden and self_correction are right and may be imitated; the others are wrong on
    purpose and never are. ``weight`` is a sampling weight, ``difficulty`` 0.1..1, ``quality`` 0..1.
    """

    turns: Annotated[list[Step], Field(min_length=1)]
    kind: SampleKind = "golden"
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    difficulty: float | None = None
    level: Level | None = None
    quality: float | None = None
    provenance: Provenance | None = None

    @property
    def steps(self) -> list[Step]:
        """The turns that call an operation."""
        return [turn for turn in self.turns if turn.op is not None]

    @property
    def final(self) -> str | None:
        """The answer that the demonstration arrives at."""
        return self.turns[-1].answer


class StopReason(enum.StrEnum):
    """Why an episode ended. Everything but ``answer`` is a value to be handled, never an exception."""

    ANSWER = "answer"
    NO_ACTION = "no_action"
    LENGTH = "length"
    OVER_TURN = "over_turn"
    OVER_CONTEXT = "over_context"
    OVER_IMAGES = "over_images"
    DEADLINE = "deadline"
    ERROR = "error"


class Trajectory(Record):
    """One episode: prompt turns, policy turns, observations, answer, rewards.

    ``rewards`` are the raw terms by name, ``weighted`` what each adds to ``reward``; ``unscored`` says why there is none.
    """

    schema_version: int = SCHEMA_VERSION
    id: str = Field(default_factory=lambda: new_id("traj"))
    question_id: str
    group_id: str = ""
    dialect: str = "qwen"
    images: list[ImageView] = Field(default_factory=list)
    turns: list[Turn] = Field(default_factory=list)
    answer: str | None = None
    stop_reason: StopReason = StopReason.ERROR
    policy_version: int = 0
    rewards: dict[str, float] = Field(default_factory=dict)
    weighted: dict[str, float] = Field(default_factory=dict)
    reward: float | None = None
    unscored: str | None = None
    advantage: float | None = None
    seconds: float = 0.0

    @field_validator("schema_version")
    @classmethod
    def _known_version(cls, value: int) -> int:
        if value != SCHEMA_VERSION:
            raise ValueError(f"trajectory schema {value} is not {SCHEMA_VERSION}: convert the file with this version's jobs")
        return value

    @property
    def actions(self) -> list[Action]:
        """Requested operations in order, failed ones included."""
        return [turn.action for turn in self.turns if turn.action is not None]

    @property
    def observations(self) -> list[Observation]:
        """Results of the operations in order."""
        return [turn.observation for turn in self.turns if turn.observation is not None]

    @property
    def objects(self) -> dict[str, dict[str, Any]]:
        """Objects and tracks that operations found so far, by their id."""
        return {found["id"]: found for o in self.observations if o.status == "ok" for found in o.data.get("objects", [])}

    @property
    def operations_ok(self) -> int:
        """Number of operations that executed."""
        return sum(o.status == "ok" for o in self.observations)

    @property
    def policy_turns(self) -> int:
        """Number of turns that the policy generated."""
        return sum(t.is_policy for t in self.turns)

    def token_ids(self) -> list[int]:
        """All token ids in order, image pads expanded."""
        return [token for turn in self.turns for token in turn.tokens]

    def loss_mask(self) -> list[int]:
        """1 on every token the policy generated and is to learn, 0 elsewhere; as long as ``token_ids``."""
        return [int(turn.is_policy and turn.learn) for turn in self.turns for _ in turn.tokens]

    def behaviour_log_probs(self) -> list[float]:
        """Behaviour log-probabilities aligned with ``token_ids``; 0.0 where nobody sampled: others' turns, demonstrations."""
        return [value for turn in self.turns for value in turn.log_probs or [0.0] * len(turn.tokens)]

    @model_validator(mode="after")
    def _log_probs_align(self) -> Trajectory:
        for i, turn in enumerate(self.turns):
            if turn.log_probs and (not turn.is_policy or len(turn.log_probs) != len(turn.tokens)):
                raise ValueError(f"turn {i}: {len(turn.log_probs)} log-probs for {len(turn.tokens)} {turn.role} tokens")
        return self


class Group(Record):
    """The rollouts of one question: the unit of advantage estimation, never split."""

    id: str = Field(default_factory=lambda: new_id("group"))
    question: Question
    trajectories: list[Trajectory] = Field(default_factory=list)
    policy_version: int = 0

    @model_validator(mode="after")
    def _one_question(self) -> Group:
        for trajectory in self.trajectories:
            if trajectory.question_id != self.question.id or trajectory.group_id != self.id:
                raise ValueError(f"trajectory {trajectory.id} does not belong to group {self.id}")
        return self

    def __reduce__(self) -> tuple[Callable[[bytes], Group], tuple[bytes]]:
        # Between processes one value: Ray's pickler asks Python code about each of the hundreds of records inside.
        return _unpickle_group, (pickle.dumps(self.__getstate__(), pickle.HIGHEST_PROTOCOL),)


def _unpickle_group(state: bytes) -> Group:
    group = Group.__new__(Group)
    group.__setstate__(pickle.loads(state))  # noqa: S301 - by Ray alone, from another process of the job
    return group


class Vote(Record):
    """One voter's answer and its weight; ``id`` is that of its trajectory or, for a neighbour, of its experience."""

    answer: str | None
    weight: float = 1.0
    source: Literal["sample", "neighbour"] = "sample"
    id: str = ""
    confidence: float | None = None
    similarity: float | None = None


class Verdict(Record):
    """The outcome of a vote with its provenance. ``answer`` None means abstained; ``confidence`` in [0, 1].

    ``self_answer`` is the first sample's; ``neighbours`` were looked up (``partial``: some shards did not answer) and those
    compatible are among ``votes``; ``answer_weights`` by canonical answer; ``strategies`` what each voted for in an ensemble.
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
    """What somebody said of a served answer: was it ``correct``, what would be right, and why."""

    correct: bool | None = None
    answer: str | None = None
    comment: str = ""
    created_at: float = 0.0


class Experience(Record):
    """A served episode as the memory keeps it: text redacted, pictures beside it, never a caller's data URL.

    ``user`` is a pseudonym (see ``evolution.privacy``). Retrievals and successes are the memory's own counts: a retrieval is a
    success when a verdict agreed with this experience, told once for each retrieval id. ``priority`` > 0.
    """

    id: str = Field(default_factory=lambda: new_id("exp"))
    question: Question
    trajectory: Trajectory
    verdict: Verdict
    policy_version: int
    created_at: float
    user: str | None = None
    status: Literal["pending", "processed", "failed", "archived"] = "pending"
    priority: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    cold_start: bool = False
    feedback: list[Feedback] = Field(default_factory=list)
    retrievals: int = 0
    successes: int = 0


class Neighbour(Record):
    """A found experience and its cosine (or negative distance) to what was asked for."""

    experience: Experience
    similarity: float


class UpdateTask(Record):
    """Work for the learner from traffic: trajectories scored against the *pseudo-label*, never a truth."""

    id: str = Field(default_factory=lambda: new_id("task"))
    question_id: str
    trajectories: list[Trajectory]
    pseudo_label: str
    confidence: float
    created_at: float
    experience_id: str = ""


class VersionStatus(enum.StrEnum):
    """Life of a policy version."""

    CANDIDATE = "candidate"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"


class PolicyVersion(Record):
    """One published set of weights: monotone number, content hash, parent, status."""

    version: Annotated[int, Field(ge=0)]
    parent: int | None = None
    sha256: str = ""
    bytes: int = 0
    status: VersionStatus = VersionStatus.CANDIDATE
    stage: str = ""
    step: int = 0
    created_at: float = 0.0
    metrics: dict[str, float] = Field(default_factory=dict)
