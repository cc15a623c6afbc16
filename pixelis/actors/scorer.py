"""The Scorer actor: reward terms of whole groups."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from pixelis.config import Config
from pixelis.records import Group
from pixelis.rewards.grader import Advance, Grader

GROUPS_AT_ONCE = 16
"""Groups that one actor scores beside each other: most of the time they wait for a judge or for processes of formulas."""


@ray.remote(max_restarts=-1, max_task_retries=2, max_concurrency=GROUPS_AT_ONCE)
class Scorer:
    """Scores complete groups, because some terms look at the whole group."""

    def __init__(self, config: Config):
        self.config = config
        self.grader = Grader(config.rewards, config.run.dir, config.run.seed)

    def health(self) -> str:
        """Answers when alive."""
        return "ok"

    def score(self, group: Group, step: int | None = None, states: dict[str, Sequence[Sequence[float]]] | None = None) -> Group:
        """The group with raw terms, total reward or the cause it is unscored on each trajectory; see ``Grader.score``."""
        return self.grader.score(group, step, states=states)

    def advance(self, step: int) -> Advance:
        """Training step ``step`` is over; tells the name of the boundary that it crossed, and metrics."""
        return self.grader.advance(step)

    def state(self) -> bytes:
        """What later scores depend on, for a checkpoint: a safetensors file."""
        return self.grader.state()

    def load(self, state: bytes) -> None:
        """Go on from the state of a checkpoint."""
        self.grader.load(state)

    def counts(self) -> dict[str, int]:
        """Causes and statuses so far, by name."""
        return dict(self.grader.tools.counts)
