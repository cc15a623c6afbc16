"""Messages between the gateway and the agent: a checked request, events meanwhile, the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import Field

from pixelis.dialogue.session import SamplingParams
from pixelis.records import Group, ImageView, Media, Neighbour, Record, Trajectory, Turn, Verdict, new_id


@dataclass(frozen=True, slots=True)
class AgentQuery:
    """A checked request. ``images`` are data URLs; ``user`` is what the caller calls itself, kept as a pseudonym only.

    ``learn`` false keeps the request out of the update stream, ``remember`` false out of the memory as well.
    """

    question: str
    images: list[str]
    samples: int
    sampling: SamplingParams
    operations: bool = True
    max_turns: int = 1
    learn: bool = True
    remember: bool = True
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of a request, decoded once: described, by reference (in a list that keeps it one), and shrunk.

    ``full`` holds the reference to {media id: uint8 [H, W, 3]}, or nothing without pictures; ``views`` have no more pixels than
    the policy sees. Whole pictures live in the object store alone, which writes to disk what does not fit.
    """

    media: list[Media]
    full: list[Any]
    views: list[np.ndarray]


class TurnEvent(Record):
    """A turn that the ``sample``-th of ``samples`` episodes just took, and the pictures that became visible with it.

    A policy turn, or an operation's observation with its views as PNG data URLs; token ids and log-probs are left out. A new
    ``attempt`` voids the events of earlier ones: their generator was lost and another began again.
    """

    sample: int
    samples: int
    turn: Turn
    images: list[ImageView] = Field(default_factory=list)
    attempt: int = 0


@dataclass(slots=True)
class Answer:
    """What the samples said: their group, the verdict, the trajectory that stands for it, a reference to all views.

    ``neighbours`` are the found experiences, those without a vote included; ``retrieval_id`` names the search that found them.
    ``experience_id`` is the name under which the answer is remembered, None where it is not. ``seconds`` as the caller waited.
    """

    verdict: Verdict
    group: Group
    winner: Trajectory
    views: Any = field(repr=False)
    experience_id: str | None = field(default_factory=lambda: new_id("exp"))
    neighbours: list[Neighbour] = field(default_factory=list)
    retrieval_id: str = ""
    cold_start: bool = False
    seconds: float = 0.0
