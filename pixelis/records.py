"""Records shared by all packages: one versioned schema for synthesis, SFT, RFT, memory, serving and logs.

Records contain references, never pixels or tensors: an image has an id within a trajectory (``img0``, ``obs1``), a URI or content
hash, and a size. Records serialise to JSON with ``model_dump_json`` and ``model_validate_json``. No torch, no ray.
"""

from __future__ import annotations

import enum
import pickle  # nosec B403
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

SCHEMA_VERSION = 1

Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 with x0 < x1 and y0 < y1, each 0..1 of a *named* observation."""

Point = tuple[float, float]
"""x, y, each 0..1 of a *named* observation."""

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Span = tuple[Seconds, Seconds]
"""A part of a clip from start to end."""

Coordinates = Literal["thousand", "pixels", "unit"]
"""A model's coordinate scale: 0..1000, pixels of the view, or 0..1."""


def new_id(prefix: str) -> str:
    """A new random id such as ``traj_3f9c…``."""
    return f"{prefix}_{uuid.uuid4().hex[:16]}"


class Record(BaseModel):
    """Base class of all records. Unknown keys are errors, so that schema differences are detected early."""

    model_config = ConfigDict(extra="forbid", validate_assignment=False, ser_json_inf_nan="constants")


class Media(Record):
    """A picture or clip of a question.

    ``uri`` is a file path, a ``data:`` URL or a ``cards:`` name (the embedded data set). A clip may also be a list of pictures,
    ``frames``, at ``fps`` per second. ``spans`` cuts a clip to its parts from ``start`` to ``end`` seconds, in order: only their
    frames exist, numbered from 0, and keep their times in the whole clip. ``width`` and ``height`` in pixels; None until it is
    decoded.
    """

    id: str
    uri: str = ""
    kind: Literal["image", "video"] = "image"
    frames: list[str] | None = None
    fps: Annotated[float, Field(gt=0)] = 1.0
    spans: list[Span] | None = None
    width: int | None = None
    height: int | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Media:
        if bool(self.uri) == bool(self.frames) or (self.frames and self.kind != "video"):
            raise ValueError("media needs either a `uri`, or `frames` for a video")
        if self.spans is not None:
            if self.kind != "video":
                raise ValueError("only a video has `spans`")
            ends = [end for span in self.spans for end in span]
            if not ends or ends != sorted(ends) or any(start == end for start, end in self.spans):
                raise ValueError("`spans` are pairs of seconds [start, end], in order and without overlap")
        return self


class Region(Record):
    """An annotated object in a picture, or in one frame of a clip (``frame`` from 0).

    Coordinates are 0..1 of ``media``. ``mask`` is a COCO run-length code at full resolution; ``outline`` is a list of polygons.
    Regions of one object in several frames share a ``track``.
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
    """Annotated text: a word, line or paragraph, with its box (0..1 of ``media``) if known."""

    text: str
    box: Box | None = None
    media: str = "img0"
    frame: int | None = None
    level: Literal["word", "line", "paragraph"] = "line"


class Event(Record):
    """An annotated event in a clip from ``start`` to ``end`` seconds."""

    text: str
    start: Annotated[float, Field(ge=0)]
    end: Annotated[float, Field(ge=0)]
    media: str = "vid0"


class Relation(Record):
    """A relation between two annotated regions, given by id."""

    subject: str
    predicate: str
    object: str


class Annotations(Record):
    """Annotations of a question's media, from which demonstrations are synthesised. Never shown to a policy."""

    regions: list[Region] = Field(default_factory=list)
    lines: list[Line] = Field(default_factory=list)
    events: list[Event] = Field(default_factory=list)
    relations: list[Relation] = Field(default_factory=list)
    captions: list[str] = Field(default_factory=list)


class Exchange(Record):
    """An earlier question of a conversation and its answer. ``media`` are the ids of the pictures and clips sent with it."""

    question: str
    answer: str
    media: list[str] = Field(default_factory=list)


class Question(Record):
    """A question about media. ``answers`` are the accepted answers; None means unlabelled.

    ``history`` are the earlier exchanges of its conversation, oldest first; the media that none of them names came with the
    question itself. For annotated pictures without a question, ``question`` is empty and ``annotations`` is set. ``tools`` names
    the operations that the policy may use for this question; None means all of the run. ``environment`` names the environment
    whose actions the policy uses instead.
    """

    id: str
    question: str
    history: list[Exchange] = Field(default_factory=list)
    media: list[Media] = Field(default_factory=list)
    answers: list[str] | None = None
    scorer: str = "exact"
    task: str = "qa"
    split: str = "train"
    tools: list[str] | None = None
    environment: str | None = None
    meta: dict[str, Any] = Field(default_factory=dict)
    annotations: Annotations | None = None

    @property
    def conversation(self) -> str:
        """The texts of the earlier exchanges and of the question, one a line: what the question means."""
        earlier = [text for exchange in self.history for text in (exchange.question, exchange.answer)]
        return "\n".join([*earlier, self.question])

    @model_validator(mode="after")
    def _media_of_history(self) -> Question:
        names = [name for exchange in self.history for name in exchange.media]
        if len(set(names)) < len(names) or not set(names) <= {item.id for item in self.media}:
            raise ValueError("each medium named in `history` must be one of `media`, and be named once")
        return self


class Action(Record):
    """A pixel operation requested by the policy.

    ``arguments`` are canonical: coordinates 0..1 of ``target`` (a media or observation id; empty for an environment's action).
    """

    op: str
    target: str = "img0"
    arguments: dict[str, Any] = Field(default_factory=dict)


class ImageView(Record):
    """An image as shown to the policy: its source and its size.

    ``box`` is relative to ``parent``; a question's own picture has neither. For a frame of a clip ``parent`` is the clip,
    ``frame`` its number from 0, ``time`` its seconds, and ``box`` a region of the frame. ``source_size`` is the size of the
    full-resolution region, ``view_size`` that of the resized view; both (width, height) in pixels.
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
    """The result of an operation. ``id`` is assigned only on success; ``seconds`` is the execution time.

    The policy reads ``text``, with coordinates in the policy's scale. ``data`` is for rewards, evaluation and pages: plain
    values, with coordinates 0..1 of the question's own picture or of a frame of its clip.
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

    ``tokens`` are exact ids (image pads expanded). ``log_probs`` (natural log-probabilities under the sampling distribution) has
    one entry per token of a generated turn and is empty for all others. The loss covers exactly the policy turns with ``learn``.
    ``further_actions`` are the calls after ``action`` of a turn with several; a tool turn follows for each.
    """

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    tokens: list[int] = Field(default_factory=list)
    log_probs: list[float] = Field(default_factory=list)
    images: list[str] = Field(default_factory=list)
    action: Action | None = None
    further_actions: list[Action] = Field(default_factory=list)
    observation: Observation | None = None
    error: str | None = None
    learn: bool = True

    @property
    def actions(self) -> list[Action]:
        """The calls of the turn in order."""
        return [self.action, *self.further_actions] if self.action is not None else []

    @property
    def is_policy(self) -> bool:
        """True when the policy generated these tokens."""
        return self.role == "assistant"


class Verbatim(Record):
    """A turn in the row of another system: the assistant's ``text`` in ``dialect``, and the user turn that follows it.

    ``result`` is the text of that turn, with its marks of images, ``images`` are their files. ``failed``: it reports an error.
    """

    dialect: str
    text: str
    result: str | None = None
    images: list[str] = Field(default_factory=list)
    failed: bool = False


class Step(Record):
    """One assistant turn of a demonstration: an operation or the answer, after an optional thought.

    Flat in files (``{"op": "zoom_in", "box": [...]}``): unknown keys are arguments of the operation. The default ``target`` is
    the first picture or clip. ``further`` are more calls of the same turn, ``{"op", "target", "arguments"}`` each. ``learn``
    False excludes the turn from the loss, for a mistake that the next turn corrects. ``observation`` is the result of the
    operation when the demonstration was created. ``verbatim`` is the turn as another system wrote it; a turn without ``op`` and
    ``answer`` is a call that cannot be read, which only stays in the context.
    """

    think: str | None = None
    op: str | None = None
    target: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    further: list[Action] = Field(default_factory=list)
    answer: str | None = None
    learn: bool = True
    observation: Observation | None = None
    verbatim: Verbatim | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "op" not in values:
            return values
        flat = {key: value for key, value in values.items() if key not in cls.model_fields}
        if flat and values.get("arguments"):
            raise ValueError(f"give arguments either in `arguments` or beside `op` ({', '.join(flat)}), not both")
        fields = {key: value for key, value in values.items() if key in cls.model_fields}
        return {**fields, "arguments": flat} if flat else fields

    @model_validator(mode="after")
    def _op_or_answer(self) -> Step:
        unreadable = self.verbatim is not None and not self.learn and self.op is None
        if (self.op is None) == (self.answer is None) and not unreadable:
            raise ValueError("a turn needs either an `op` or an `answer`")
        if self.further and self.op is None:
            raise ValueError("`further` calls follow an `op`")
        return self


class Provenance(Record):
    """The origin of a demonstration: source and row, method of creation, and injected errors."""

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
    """A question with the turns of an assistant: a Chain-of-Thought-Action sample.

    ``turns`` end with an answer. The kinds golden and self_correction are right and may be imitated; the others are intentionally
    wrong and never imitated. ``weight`` is a sampling weight, ``difficulty`` is 0.1..1, ``quality`` is 0..1.
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
        """The answer of the last turn."""
        return self.turns[-1].answer


class StopReason(enum.StrEnum):
    """Why an episode ended."""

    ANSWER = "answer"
    NO_ACTION = "no_action"
    DONE = "done"
    LENGTH = "length"
    OVER_TURN = "over_turn"
    OVER_CONTEXT = "over_context"
    OVER_IMAGES = "over_images"
    DEADLINE = "deadline"
    ERROR = "error"


class Trajectory(Record):
    """One episode: prompt turns, policy turns, observations, answer, rewards.

    ``rewards`` are the raw terms by name, ``weighted`` their contributions to ``reward``; ``unscored`` is the reason if there is
    no reward.
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
            raise ValueError(f"trajectory schema {value} is not supported, expected {SCHEMA_VERSION}: convert the file")
        return value

    @property
    def actions(self) -> list[Action]:
        """Requested operations in order, failed ones included."""
        return [action for turn in self.turns for action in turn.actions]

    @property
    def observations(self) -> list[Observation]:
        """Results of the operations in order."""
        return [turn.observation for turn in self.turns if turn.observation is not None]

    @property
    def objects(self) -> dict[str, dict[str, Any]]:
        """Objects and tracks of all operations so far, by id."""
        return {item["id"]: item for o in self.observations if o.status == "ok" for item in o.data.get("objects", [])}

    @property
    def operations_ok(self) -> int:
        """Number of successfully executed operations."""
        return sum(o.status == "ok" for o in self.observations)

    @property
    def policy_turns(self) -> int:
        """Number of policy turns."""
        return sum(t.is_policy for t in self.turns)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def learnt_tokens(self) -> int:
        """Number of tokens of policy turns with ``learn``."""
        return sum(len(turn.tokens) for turn in self.turns if turn.is_policy and turn.learn)

    def token_ids(self) -> list[int]:
        """All token ids in order, image pads expanded."""
        return [token for turn in self.turns for token in turn.tokens]

    def loss_mask(self) -> list[int]:
        """1 for the tokens of policy turns with ``learn``, else 0; aligned with ``token_ids``."""
        return [int(turn.is_policy and turn.learn) for turn in self.turns for _ in turn.tokens]

    def behaviour_log_probs(self) -> list[float]:
        """Behaviour log-probabilities aligned with ``token_ids``; 0.0 for tokens that were not sampled."""
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
        # Pickled as one value: Ray's pickler calls Python code for each of the hundreds of records inside.
        return _unpickle_group, (pickle.dumps(self.__getstate__(), pickle.HIGHEST_PROTOCOL),)


def _unpickle_group(state: bytes) -> Group:
    # Only from other processes of the same job, through Ray.
    group = Group.__new__(Group)
    group.__setstate__(pickle.loads(state))  # noqa: S301 # nosec B301
    return group


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
    """The result of a vote with its provenance. ``answer`` None means abstention; ``confidence`` is in [0, 1].

    ``self_answer``: the first sample's answer. ``neighbours``: number of retrieved experiences, of which the compatible ones are
    in ``votes``. ``partial``: some memory shards did not answer. ``answer_weights``: weights by class of equal answers.
    ``strategies``: the answer of each strategy of an ensemble.
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
    """A user's feedback on a served answer: whether it is ``correct``, the right ``answer``, and a comment."""

    correct: bool | None = None
    answer: str | None = None
    comment: str = ""
    created_at: float = 0.0


class Experience(Record):
    """A served episode as stored in memory: text redacted, pictures stored separately, no data URLs.

    ``user`` is a pseudonym (see ``evolution.privacy``). The memory counts ``retrievals`` and ``successes``: a retrieval succeeds
    if the verdict agrees with this experience; each retrieval id counts once.
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
    """A retrieved experience and its similarity to the query: cosine or negative distance."""

    experience: Experience
    similarity: float


class UpdateTask(Record):
    """A learner task from traffic: trajectories scored against the *pseudo-label*, never against a truth.

    ``user`` is the pseudonym of who asked, empty if unknown: shares of an update are capped by it.
    """

    id: str = Field(default_factory=lambda: new_id("task"))
    question_id: str
    trajectories: list[Trajectory]
    pseudo_label: str
    confidence: float
    created_at: float
    experience_id: str = ""
    user: str = ""


class VersionStatus(enum.StrEnum):
    """Status of a policy version."""

    CANDIDATE = "candidate"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"


class PolicyVersion(Record):
    """A published set of weights: increasing number, content hash, parent, status."""

    version: Annotated[int, Field(ge=0)]
    parent: int | None = None
    sha256: str = ""
    bytes: int = 0
    status: VersionStatus = VersionStatus.CANDIDATE
    stage: str = ""
    step: int = 0
    created_at: float = 0.0
    metrics: dict[str, float] = Field(default_factory=dict)
