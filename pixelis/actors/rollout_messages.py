"""Messages between routers and generators: requests for episodes, their turns and text, and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import ray

from pixelis.actors.group_views import GroupViews
from pixelis.dialogue.session import SamplingParams
from pixelis.records import Group, Question, Turn


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """`samples` episodes of a question.

    pictures: references to decoded images by id, uint8 [H, W, 3]; augmentations: under which the samples see
    the pictures in turn, the first without; known: references to first views that the caller has, by medium
    (the router sets it); text: whether a stream has the text of the first sample too; trace: W3C
    `traceparent` of the caller.
    """

    question: Question
    group_id: str
    samples: int
    sampling: SamplingParams
    operations: bool = True
    max_turns: int | None = None
    pictures: Mapping[str, ray.ObjectRef] = field(default_factory=dict)
    augmentations: Sequence[str] = ()
    views: bool = True
    known: Mapping[str, ray.ObjectRef] = field(default_factory=dict)
    text: bool = False
    trace: str = ""


@dataclass(frozen=True, slots=True)
class RolloutResult:
    group: Group
    views: GroupViews


@dataclass(frozen=True, slots=True)
class TurnUpdate:
    """A turn of a sample and the uint8 views that it adds; a higher `attempt` restarts all samples."""

    attempt: int
    sample: int
    turn: Turn
    views: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """New text of a sample; a higher `attempt` restarts all samples."""

    attempt: int
    sample: int
    text: str
