"""Messages between routers and generators: requests for episodes, their turns and text, and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import ray

from pixelis.actors.group_views import GroupViews
from pixelis.dialogue.resumption import Said
from pixelis.dialogue.session import SamplingParams
from pixelis.records import Group, Media, Question, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class ClientContent:
    """Text of a client with pictures at its `<image>`; the ids of all media of a request differ."""

    text: str = ""
    media: Sequence[Media] = ()


@dataclass(frozen=True, slots=True)
class EpisodeSoFar:
    """An episode that a client goes on with, or begins: its trajectory has no turns yet, and the id to take.

    added: `GroupViews.added` of the result that the trajectory is from, or is the beginning of (`resumption.up_to`).
    """

    trajectory: Trajectory
    said: Sequence[Said[ClientContent]] = ()
    added: ray.ObjectRef | None = None


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """`samples` episodes of a question.

    pictures: references to decoded images by id, uint8 [H, W, 3]; augmentations: under which the samples see
    the pictures in turn, the first without; known: references to first views that the caller has, by medium
    (the router sets it); text: whether a stream has the text of the first sample too; trace: W3C
    `traceparent` of the caller; resume: one for each sample of an outside agent; sample: number of the first
    sample in its group, which with `sampling.seed` and the prompt determines its random numbers; causal_use:
    measure that of each observation.
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
    resume: Sequence[EpisodeSoFar] = ()
    sample: int = 0
    causal_use: bool = False


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
