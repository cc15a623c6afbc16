"""Buffer of finished groups between generators and learner: decides on admission and completes batches.

A batch is the first ``prompts_per_step`` admissible groups to finish, so a straggler delays only itself. With
``max_off_policy_steps=0`` it is exactly the step's own prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pixelis.actors.group_views import GroupViews
from pixelis.config import RftConfig
from pixelis.errors import DataFailure
from pixelis.records import Group

MAX_GROUP_FAILURES = 0.5
"""Share of a batch's groups that may fail because of their data before the run stops."""


@dataclass(eq=False)
class ScoredGroup:
    """A scored group, its views, and what the batch and its metrics need to know of it."""

    group: Group
    views: GroupViews
    greedy: float | None = None
    number: int = 0
    """Number of the question in the stream."""
    accuracy: dict[str, float] = field(default_factory=dict)
    """Accuracy by trajectory where the reader has cut the truth off: for metrics alone."""
    outcome: Literal["kept", "uninformative", "abstained"] = "kept"


@dataclass
class Selection:
    """The chosen groups of a batch in the order of their questions, and the others, by reason.

    ``numbers`` are those of all questions that this batch has used.
    """

    chosen: list[ScoredGroup] = field(default_factory=list)
    uninformative: list[ScoredGroup] = field(default_factory=list)
    abstained: list[ScoredGroup] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    stale: list[ScoredGroup] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def add(self, group: ScoredGroup) -> None:
        by_outcome = {"kept": self.chosen, "uninformative": self.uninformative, "abstained": self.abstained}
        by_outcome[group.outcome].append(group)
        self.numbers.append(group.number)


class RolloutBuffer:
    """Counts admitted, running and finished groups in *slots*: one for each group of a batch.

    A group without a signal gives its slot to a new question while ``rft.filter.max_oversampling`` allows it;
    otherwise it keeps the slot and the batch is smaller. A failed group always gives up its slot.
    """

    def __init__(self, rft: RftConfig, step: int):
        self.rft = rft
        self.admitted = step * rft.prompts_per_step
        """Slots assigned since the first step of the run, including those of earlier batches."""
        self.finished: list[ScoredGroup] = []
        """In order of completion."""
        self.replaced = 0
        self.pending = Selection()

    def room(self, step: int) -> int:
        """Number of groups that may be admitted after ``step`` learnt batches."""
        last = min(self.rft.max_off_policy_steps + step + 1, self.rft.steps)
        return last * self.rft.prompts_per_step - self.admitted

    def admit(self) -> int:
        """Take a slot; returns the step whose batch it would belong to if groups finished in order."""
        self.admitted += 1
        return (self.admitted - 1) // self.rft.prompts_per_step

    def add(self, group: ScoredGroup) -> None:
        self.finished.append(group)

    def add_unusable(self, group: ScoredGroup, abstained: bool) -> None:
        """Add a group without a signal: its rollouts have no majority, or all the same outcome."""
        group.outcome = "abstained" if abstained else "uninformative"
        size = self.rft.prompts_per_step
        if size + self.replaced < self.rft.filter.max_oversampling * size:
            self.pending.add(group)
            self._replace()
        else:
            self.finished.append(group)

    def add_failed(self, number: int, cause: str) -> None:
        """Add a question that could not be rolled out or scored. DataFailure if too many of a batch fail."""
        self.pending.failures[cause] += 1
        self.pending.numbers.append(number)
        self._replace()
        if self.pending.failures.total() > max(self.rft.prompts_per_step * MAX_GROUP_FAILURES, 4):
            message = f"too many unusable groups in a batch: {dict(self.pending.failures)}"
            raise DataFailure(message, fix="look at events.jsonl")

    def _replace(self) -> None:
        self.replaced += 1
        self.admitted -= 1

    def take(self, age: Callable[[ScoredGroup], int]) -> Selection | None:
        """Remove and return the next batch; None if it is incomplete.

        ``age``: steps that a group lags behind this batch. Drops groups older than ``max_off_policy_steps``.
        """
        stale = [g for g in self.finished if age(g) > self.rft.max_off_policy_steps]
        if stale:
            self.finished = [g for g in self.finished if g not in stale]
            self.admitted -= len(stale)
            self.pending.stale += stale
            self.pending.numbers += [g.number for g in stale]
        size = self.rft.prompts_per_step
        if len(self.finished) < size:
            return None
        slots, self.finished = self.finished[:size], self.finished[size:]
        selection, self.pending, self.replaced = self.pending, Selection(), 0
        for group in slots:
            selection.add(group)
        selection.chosen.sort(key=lambda g: g.number)
        selection.numbers.sort()
        return selection
