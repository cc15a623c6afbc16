"""What a streamed rollout reports before its group: turns, and the text of the turn that is being generated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pixelis.records import Turn


@dataclass(frozen=True, slots=True)
class TurnUpdate:
    """A turn of a sample and the uint8 views that it adds. A higher `attempt` restarts all samples on another generator."""

    attempt: int
    sample: int
    turn: Turn
    views: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """A piece of the text of a sample's next turn."""

    attempt: int
    sample: int
    text: str
