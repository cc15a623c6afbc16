"""What a gateway passes to its agent and gets back: actors, query, pictures, events, answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from pydantic import Field

from pixelis.actors.group_views import GroupViews
from pixelis.dialogue.session import SamplingParams
from pixelis.protocol.answer_format import AnswerFormat
from pixelis.records import Exchange, Group, ImageView, Media, Neighbour, Record, Trajectory, Turn, Verdict


@dataclass(frozen=True)
class Backends:
    """Names of the running actors in ``namespace``, by which a replica on any node finds them.

    ``memory`` lists the shards in order; ``scaler`` lists the generators while their number changes.
    """

    generators: tuple[str, ...]
    namespace: str
    evolution: str | None = None
    memory: tuple[str, ...] = ()
    embedder: str | None = None
    scaler: str | None = None
    episodes: str | None = None


@dataclass(frozen=True, slots=True)
class AgentQuery:
    """A validated question. ``images`` and ``clips`` are data URLs, clips also encoded bytes.

    ``history`` and ``places`` name them by id (``img0``, ``vid0``, ...). ``user`` is the pseudonym to store,
    ``voter`` the one whose share of an update is capped. ``response`` describes the answer in the experience.
    """

    question: str
    images: list[str]
    samples: int
    sampling: SamplingParams
    operations: bool = True
    max_turns: int = 1
    learn: bool = True
    remember: bool | Literal["later"] = True
    clips: Sequence[str | bytes] = ()
    history: list[Exchange] = field(default_factory=list)
    places: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    voter: str = ""
    experience_id: str | None = None
    answers: AnswerFormat | None = None
    response: Callable[[Answer], dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Picture:
    """A decoded picture: object reference to uint8 [H, W, 3], and view for the Embedder. ``uri`` is a hash.

    ``details`` are those of `pixelis.operations.image`; empty if the memory keeps no pictures.

    Requests in progress that show the same picture share this object.
    """

    uri: str
    height: int
    width: int
    ref: Any
    view: np.ndarray
    details: str


@dataclass(frozen=True, slots=True)
class Pictures:
    """The decoded pictures and opened clips of a request.

    ``full`` are object references to uint8 [H, W, 3] or Clip by media id. ``views``, of pictures and of some
    frames of each clip, have the policy's pixel budget. ``shared`` keeps the pictures for other requests.
    """

    media: list[Media]
    full: dict[str, Any]
    views: list[np.ndarray]
    shared: list[Picture]


class TurnEvent(Record):
    """A turn of the ``sample``-th of ``samples`` episodes, without token ids and log-probs.

    ``images`` are the views of an observation as PNG data URLs. A higher ``attempt`` replaces the events of
    lower ones, whose generator was lost.
    """

    sample: int
    samples: int
    turn: Turn
    images: list[ImageView] = Field(default_factory=list)
    attempt: int = 0
    augmentation: str | None = None


class TextEvent(Record):
    """A piece of text of the next turn of the ``sample``-th of ``samples`` episodes."""

    sample: int
    samples: int
    text: str
    attempt: int = 0


@dataclass(slots=True)
class Answer:
    """The samples of a question, their verdict, and the ``winner``: the first with the verdict's answer.

    ``accepted`` are the samples whose answers have the query's format, ``pngs`` the winner's views by image
    id once encoded, ``originals`` references to the question's pictures by media id. ``remembered`` is "yes"
    with an ``experience_id`` that is on disk; otherwise it says why not.
    """

    verdict: Verdict
    group: Group
    winner: Trajectory
    views: GroupViews = field(repr=False)
    accepted: list[Trajectory] = field(default_factory=list, repr=False)
    experience_id: str | None = None
    remembered: str = "no"
    pngs: dict[str, bytes] = field(default_factory=dict, repr=False)
    neighbours: list[Neighbour] = field(default_factory=list)
    retrieval_id: str = ""
    cold_start: bool = False
    seconds: float = 0.0
    originals: dict[str, Any] = field(default_factory=dict, repr=False)
