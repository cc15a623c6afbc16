"""Episodes: actions, observations, turns, trajectories and the groups of a question's rollouts."""

from __future__ import annotations

import enum
import math
import pickle  # nosec B403
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pixelis.records.question import SCHEMA_VERSION, Box, Question, Record, new_id

REAL = "real"
"""Kind of the observation that a call did return, in ``answer_log_probs``."""
ELSEWHERE = "elsewhere"
"""Kind of a sham that shows what the same call returns at another place."""
MISLEADING = "another"
"""Kind of a sham that shows what the operation returned for another question."""
MAX_TERMS = 16
"""Most terms of an outcome."""
TermName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Action(Record):
    """A pixel operation requested by the policy.

    ``arguments`` are canonical: coordinates 0..1 of ``target`` (a media or observation id; empty for an
    environment).
    """

    op: str
    target: str = "img0"
    arguments: dict[str, Any] = Field(default_factory=dict)


class ImageView(Record):
    """An image as shown to the policy: its source and its size.

    ``box`` is relative to ``parent``; a question's own picture has neither. For a frame of a clip ``parent``
    is the clip, ``time`` in seconds, and ``box`` a region of the frame. ``source_size`` (full resolution) and
    ``view_size`` are (width, height) in pixels.
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

    The policy reads ``text``, with coordinates in its scale. ``data`` is for rewards, evaluation and pages:
    plain values, with coordinates 0..1 of the question's own picture or of a frame of its clip.
    ``answer_log_probs``: of the episode's last turn with this observation (``REAL``) and, by kind, with a sham
    in its place; empty where that was not measured.
    """

    status: Literal["ok", "error"]
    id: str | None = None
    text: str = ""
    code: str | None = None
    images: list[ImageView] = Field(default_factory=list)
    data: dict[str, Any] = Field(default_factory=dict)
    answer_log_probs: dict[str, float] = Field(default_factory=dict)
    seconds: float = 0.0

    @property
    def causal_use(self) -> float | None:
        """Nats by which the answer is likelier than with shams, in the mean; None where not measured."""
        shams = self._shams
        return self.answer_log_probs[REAL] - math.fsum(shams) / len(shams) if shams else None

    @property
    def sham_uses(self) -> list[float]:
        """What `causal_use` would be had each sham been the real observation; empty if there is one sham alone."""
        total, count = math.fsum(self._shams), len(self._shams)
        return [value - (total - value) / (count - 1) for value in self._shams] if count > 1 else []

    @property
    def _shams(self) -> list[float]:
        """Of the shams that take the evidence away: from elsewhere pictures do, where a text tells of another thing."""
        others = {REAL, MISLEADING} | ({ELSEWHERE} if self.text else set())
        return [value for kind, value in self.answer_log_probs.items() if kind not in others]


class Turn(Record):
    """A contiguous run of tokens by one author.

    ``tokens`` are exact ids (image pads expanded). ``log_probs`` (natural, under the sampling distribution)
    has one entry per token of a generated turn and is empty for others. ``further_actions`` follow ``action``
    in a turn with several calls; a tool turn follows for each. ``top_log_probs``: the most likely tokens at
    each place, for a request that asks for them; never written.
    """

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    tokens: list[int] = Field(default_factory=list)
    log_probs: list[float] = Field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] = Field(default_factory=list, exclude=True)
    images: list[str] = Field(default_factory=list)
    action: Action | None = None
    further_actions: list[Action] = Field(default_factory=list)
    observation: Observation | None = None
    error: str | None = None
    learn: bool = True

    @property
    def actions(self) -> list[Action]:
        return [self.action, *self.further_actions] if self.action is not None else []

    @property
    def is_policy(self) -> bool:
        return self.role == "assistant"


class StopReason(enum.StrEnum):
    """``call``: the policy called a client's function, and only its client can go on."""

    ANSWER = "answer"
    NO_ACTION = "no_action"
    CALL = "call"
    DONE = "done"
    LENGTH = "length"
    OVER_TURN = "over_turn"
    OVER_CONTEXT = "over_context"
    OVER_IMAGES = "over_images"
    DEADLINE = "deadline"
    ERROR = "error"


class Trajectory(Record):
    """One episode: prompt turns, policy turns, observations, answer, rewards.

    ``augmentation`` names the correction under which the policy saw the views (``dialogue.augmentation``).
    ``rewards`` are the raw terms by name, ``weighted`` their contributions to ``reward``; ``unscored`` is the
    reason if there is none. ``outcome``: terms that an outside agent, environment or verifier gave, None if none
    did. ``policy_version`` is the oldest that took a turn. ``transplanted``: the policy turns followed another
    prompt, to which their ``log_probs`` belong.
    """

    schema_version: int = SCHEMA_VERSION
    id: str = Field(default_factory=lambda: new_id("traj"))
    question_id: str
    group_id: str = ""
    dialect: str = "qwen"
    augmentation: str | None = None
    images: list[ImageView] = Field(default_factory=list)
    turns: list[Turn] = Field(default_factory=list)
    answer: str | None = None
    stop_reason: StopReason = StopReason.ERROR
    policy_version: int = 0
    outcome: Annotated[dict[TermName, Finite], Field(max_length=MAX_TERMS)] | None = None
    rewards: dict[str, float] = Field(default_factory=dict)
    weighted: dict[str, float] = Field(default_factory=dict)
    reward: float | None = None
    unscored: str | None = None
    advantage: float | None = None
    transplanted: bool = False
    seconds: float = 0.0

    @field_validator("schema_version")
    @classmethod
    def _known_version(cls, value: int) -> int:
        if value != SCHEMA_VERSION:
            raise ValueError(f"trajectory schema {value} is not supported, expected {SCHEMA_VERSION}")
        return value

    @property
    def actions(self) -> list[Action]:
        """Requested operations in order, failed ones included."""
        return [action for turn in self.turns for action in turn.actions]

    @property
    def executed(self) -> list[tuple[Action, Observation]]:
        """Executed operations with what each returned, in order, failed ones included."""
        return [
            (action, reply.observation)
            for number, turn in enumerate(self.turns)
            for action, reply in zip(turn.actions, self.turns[number + 1 :], strict=False)
            if reply.observation is not None
        ]

    @property
    def observations(self) -> list[Observation]:
        return [turn.observation for turn in self.turns if turn.observation is not None]

    @property
    def objects(self) -> dict[str, dict[str, Any]]:
        """Objects and tracks of all operations so far, by id."""
        return {
            item["id"]: item
            for o in self.observations
            if o.status == "ok"
            for item in o.data.get("objects", [])
        }

    @property
    def operations_ok(self) -> int:
        return sum(o.status == "ok" for o in self.observations)

    @property
    def replies(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.is_policy]

    @property
    def policy_turns(self) -> int:
        return len(self.replies)

    @property
    def tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def learnt_tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.replies if turn.learn)

    def token_ids(self) -> list[int]:
        """All token ids in order, image pads expanded."""
        return [token for turn in self.turns for token in turn.tokens]

    def loss_mask(self) -> list[int]:
        """1 for the tokens of policy turns with ``learn``, else 0; aligned with `token_ids`."""
        return [int(turn.is_policy and turn.learn) for turn in self.turns for _ in turn.tokens]

    def behaviour_log_probs(self) -> list[float]:
        """Behaviour log-probabilities aligned with `token_ids`; 0.0 for tokens that were not sampled."""
        return [value for turn in self.turns for value in turn.log_probs or [0.0] * len(turn.tokens)]

    @model_validator(mode="after")
    def _log_probs_align(self) -> Trajectory:
        for i, turn in enumerate(self.turns):
            if turn.log_probs and (not turn.is_policy or len(turn.log_probs) != len(turn.tokens)):
                raise ValueError(
                    f"turn {i}: {len(turn.log_probs)} log-probs for {len(turn.tokens)} {turn.role} tokens"
                )
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
