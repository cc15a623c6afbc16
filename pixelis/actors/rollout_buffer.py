"""Buffers finished groups between generators and learner: decides what is admitted and when a batch is complete.

A batch is the first ``prompts_per_step`` admissible groups to finish, so a straggler delays only itself. With
``max_off_policy_steps=0`` no more than the groups of one step are ever admitted, and a batch is exactly the step's own prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import ray

from pixelis.config import RftConfig
from pixelis.errors import DataFailure
from pixelis.records import Group

MAX_GROUP_FAILURES = 0.5
"""Share of a batch's groups that may fail for data reasons before the run stops with an error."""


@dataclass(eq=False)
class ScoredGroup:
    """A scored group, the reference to its views, and the reward of a greedy rollout where the baseline needs one."""

    group: Group
    views: ray.ObjectRef
    greedy: float | None = None
    number: int = 0
    """Of its question in the stream."""


@dataclass
class Selection:
    """The groups of a batch in the order of their questions, those that were tried beside them, and what became of the rest.

    ``numbers`` are those of all questions that are used up with this batch.
    """

    chosen: list[ScoredGroup] = field(default_factory=list)
    uninformative: list[ScoredGroup] = field(default_factory=list)
    abstained: list[ScoredGroup] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    stale: list[ScoredGroup] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


class RolloutBuffer:
    """Counts what is admitted, running and finished, in *slots*: one for each group of a batch.

    A group that cannot be learnt from (uninformative, abstained) gives its slot to a new question as long as
    ``rft.filter.max_oversampling`` allows; beyond that the slot stays empty and the batch is smaller. A failed one always does.
    """

    def __init__(self, rft: RftConfig, step: int):
        self.rft = rft
        self.admitted = step * rft.prompts_per_step
        """Slots given out since the first step of the run, those of batches already taken included."""
        self.finished: list[ScoredGroup | None] = []
        """In the order in which they finished; None for a slot that stays empty."""
        self.replaced = 0
        self.pending = Selection()

    def room(self, step: int) -> int:
        """How many groups may be admitted while ``step`` batches are learnt from."""
        last = min(self.rft.max_off_policy_steps + step + 1, self.rft.steps)
        return last * self.rft.prompts_per_step - self.admitted

    def admit(self) -> int:
        """Take a slot; the step whose batch it would complete if groups finished in order."""
        self.admitted += 1
        return (self.admitted - 1) // self.rft.prompts_per_step

    def add(self, group: ScoredGroup) -> None:
        """A group to learn from."""
        self.finished.append(group)

    def add_unusable(self, group: ScoredGroup, abstained: bool) -> None:
        """A group that teaches nothing: its rollouts have no majority, or all the same outcome."""
        (self.pending.abstained if abstained else self.pending.uninformative).append(group)
        self.pending.numbers.append(group.number)
        r = self.rft
        if r.prompts_per_step + self.replaced < r.filter.max_oversampling * r.prompts_per_step:
            self._replace()
        else:
            self.finished.append(None)

    def add_failed(self, number: int, cause: str) -> None:
        """A question that could not be rolled out or scored. Raises DataFailure when too many of a batch fail."""
        self.pending.failures[cause] += 1
        self.pending.numbers.append(number)
        self._replace()
        if self.pending.failures.total() > max(self.rft.prompts_per_step * MAX_GROUP_FAILURES, 4):
            raise DataFailure(f"too many unusable groups in a batch: {dict(self.pending.failures)}", fix="look at events.jsonl")

    def _replace(self) -> None:
        self.replaced += 1
        self.admitted -= 1

    def take(self, age: Callable[[ScoredGroup], int]) -> Selection | None:
        """The next batch, or None when it is not complete. ``age``: steps that a group lags behind this batch.

        Groups older than ``max_off_policy_steps`` are dropped, and their slots given out again.
        """
        old = [g for g in self.finished if g is not None and age(g) > self.rft.max_off_policy_steps]
        if old:
            self.finished = [g for g in self.finished if g not in old]
            self.admitted -= len(old)
            self.pending.stale += old
            self.pending.numbers += [g.number for g in old]
        size = self.rft.prompts_per_step
        if len(self.finished) < size:
            return None
        taken, self.finished = self.finished[:size], self.finished[size:]
        selection, self.pending, self.replaced = self.pending, Selection(), 0
        selection.chosen = sorted((g for g in taken if g is not None), key=lambda g: g.number)
        selection.numbers = sorted([*selection.numbers, *(g.number for g in selection.chosen)])
        return selection
