"""Decides by question whether the policy looks closer or answers at once, and shows it what it should do.

Confidence is the share of right answers without operations. Above a threshold the policy answers at once.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from pixelis.config import RewardsConfig
from pixelis.datasets.refinement.filters import Outcomes
from pixelis.records import Demonstration, Group, Provenance, Question, Step, Trajectory, Verbatim
from pixelis.rewards.equality import Equality, classes
from pixelis.rewards.extraction import answers_of
from pixelis.rewards.services import Services
from pixelis.rewards.vote import Ballot, by_majority

CLEAR = 0.5
"""A vote is a label if more than this share of the looking episodes agree."""


@dataclasses.dataclass(frozen=True)
class Played:
    """The episodes of a question with operations (``looking``) and without (``glance``).

    ``right`` by trajectory id; empty without a label.
    """

    looking: Group
    glance: Group
    right: Mapping[str, bool]

    @classmethod
    def of(cls, looking: Group, glance: Group, rewards: RewardsConfig, services: Services) -> Played:
        """Right is what the scorer accepts, or without truths what most of the looking episodes answer."""
        question, episodes = looking.question, [*looking.trajectories, *glance.trajectories]
        if question.answers:
            scored = (t for t in episodes if "accuracy" in t.rewards)
            return cls(looking, glance, {t.id: t.rewards["accuracy"] > 0.5 for t in scored})
        answers = answers_of([looking, glance], rewards, services)
        same = Equality(question, rewards.scorer_of(question.task, question.scorer), services)
        names = dict(zip(answers, classes(answers.values(), same), strict=True))
        elected = by_majority([Ballot(names[t.id], 1.0) for t in looking.trajectories])
        is_clear = len(elected.best) == 1 and elected.confidence > CLEAR
        return cls(looking, glance, {t: name == elected.key for t, name in names.items()} if is_clear else {})

    @property
    def outcomes(self) -> Outcomes:
        def scores(group: Group) -> list[float]:
            return [float(self.right[t.id]) for t in group.trajectories if t.id in self.right]

        return Outcomes(scores(self.looking), scores(self.glance))

    def demonstrations(self, threshold: float | None, keep: int) -> list[Demonstration]:
        """The at most ``keep`` shortest right episodes of the arm that the threshold selects.

        Episodes that look without a successful call, or with a failed one, would teach guesses or mistakes.
        """
        episodes = [t for t in self.looking.trajectories if t.operations_ok and not has_failure(t)]
        if answers_at_once(self.outcomes, threshold):
            episodes = self.glance.trajectories
        right = [t for t in episodes if self.right.get(t.id) and t.answer is not None]
        shortest = sorted(right, key=lambda t: t.learnt_tokens)[:keep]
        return [demonstration(self.looking.question, t, number) for number, t in enumerate(shortest)]


def answers_at_once(outcomes: Outcomes, threshold: float | None) -> bool:
    """Whether the confidence reaches the threshold; never without one."""
    return threshold is not None and bool(outcomes.glance) and statistics.fmean(outcomes.glance) >= threshold


def mixture(outcomes: Outcomes, threshold: float) -> float | None:
    """Expected score of answering at once from the threshold on; None if unknown.

    The confidence of each episode without operations is that of the others, so that none vouches for itself.
    """
    if outcomes.rate is None or len(outcomes.glance) < 2:
        return outcomes.rate
    total, others = sum(outcomes.glance), len(outcomes.glance) - 1
    return statistics.fmean(
        score if (total - score) / others >= threshold else outcomes.rate for score in outcomes.glance
    )


def has_failure(trajectory: Trajectory) -> bool:
    is_refused = any(observation.status != "ok" for observation in trajectory.observations)
    return is_refused or any(turn.error is not None for turn in trajectory.replies)


def demonstration(question: Question, trajectory: Trajectory, number: int) -> Demonstration:
    """An episode that ends with an answer, in the policy's own words."""

    def steps() -> Iterator[Step]:
        for turn in trajectory.replies:
            said: dict[str, Any] = {"verbatim": Verbatim(dialect=trajectory.dialect, text=turn.text)}
            if turn.action is None:
                yield Step(answer=trajectory.answer, **said)
            else:
                yield Step(**turn.action.model_dump(), further=turn.further_actions, **said)

    provenance = Provenance(source="", original_id=question.id, method="look_less")
    id = f"{question.id}-distilled-{number}"
    return Demonstration.of(question, turns=list(steps()), id=id, provenance=provenance)
