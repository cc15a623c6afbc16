"""Decides what a group of an outside agent's episodes teaches: by their rewards, otherwise by their vote.

A reward is a claim of its sender. It decides what the group teaches, within the sender's shares, but it never
votes: neither as an experience nor for a question of the canary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pixelis.config import EvolutionConfig, RewardsConfig
from pixelis.evolution.updates import label_group, make_task
from pixelis.records import Experience, Group, Question, Trajectory, UpdateTask, Verdict
from pixelis.rewards.equality import Equality, classes, spellings
from pixelis.rewards.scorers import canonical
from pixelis.rewards.services import shared_services
from pixelis.rewards.terms import BROKEN
from pixelis.rewards.vote import MIN_VOTES, REWARDED, vote

MIN_REWARDED = 2
"""Rewarded episodes of a group that teaches: one has nothing to be better than."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Lesson:
    """A task, or the ``cause`` why a group teaches nothing; the verdict, if there was a vote or a reward."""

    task: UpdateTask | None = None
    verdict: Verdict | None = None
    cause: str = ""


def experience_verdict(
    trajectory: Trajectory, question: Question, evolution: EvolutionConfig, now: float
) -> Verdict:
    """The verdict of a single episode, which is no evidence: its experience does not vote."""
    verdict = vote([trajectory], (), evolution, question, now)
    if trajectory.outcome is None:
        return verdict
    return verdict.model_copy(update={"strategy": "reward", "reason": REWARDED})


def lesson(
    experiences: Sequence[Experience],
    evolution: EvolutionConfig,
    rewards: RewardsConfig,
    user: str,
    now: float,
) -> Lesson:
    """What the episodes of a group teach. Those of failed agents do not count, nor those without a reward
    beside rewarded ones.
    """
    sound = [e for e in experiences if e.trajectory.stop_reason not in BROKEN]
    rewarded = [e for e in sound if e.trajectory.outcome is not None]
    if not sound:
        return Lesson(cause="failed")
    decision = _by_reward(sound, rewarded, rewards) if rewarded else _by_vote(sound, evolution, rewards, now)
    if decision.task is None:
        return decision
    # The same for a repetition: Evolution takes it once
    id = f"task_{sound[0].trajectory.group_id.removeprefix('group_')}"
    details: dict[str, Any] = {"id": id, "user": user, "created_at": now}
    details["experiences"] = {e.trajectory.id: e.id for e in sound}
    return Lesson(decision.task.model_copy(update=details), decision.verdict)


def _by_reward(sound: Sequence[Experience], rewarded: Sequence[Experience], rewards: RewardsConfig) -> Lesson:
    """The label is the commonest answer of the best; its confidence the share of episodes that say it."""
    if len(rewarded) < MIN_REWARDED:
        return Lesson(cause="few_rewards")
    values = bounded([math.fsum((e.trajectory.outcome or {}).values()) for e in rewarded])
    if max(values) - min(values) <= ROUNDING:
        return Lesson(cause="equal_rewards")
    question, answers = rewarded[0].question, [e.trajectory.answer for e in sound]
    names = classes(answers, _equality(question, rewards))
    name_of = {e.id: name for e, name in zip(sound, names, strict=True)}
    best = [e for e, value in zip(rewarded, values, strict=True) if value >= max(values) - ROUNDING]
    ((winner, _),) = Counter(name_of[e.id] for e in best).most_common(1)
    teacher = next(e for e in best if name_of[e.id] == winner)
    label = "" if winner is None else spellings(answers, names)[winner]
    said = sum(bool(label) and name_of[e.id] == winner and says_its_answer(e.trajectory) for e in sound)
    confidence = said / len(sound) / (1 if said >= MIN_VOTES else 2)
    trajectories = [
        e.trajectory.model_copy(update={"outcome": {"reward": value}})
        for e, value in zip(rewarded, values, strict=True)
    ]
    task = label_group(_group(question, trajectories), label, rewards)
    task = task.model_copy(update={"confidence": confidence, "experience_id": teacher.id})
    verdict = Verdict(answer=label or None, confidence=confidence, strategy="reward", reason=REWARDED)
    return Lesson(task, verdict)


def _by_vote(
    sound: Sequence[Experience], evolution: EvolutionConfig, rewards: RewardsConfig, now: float
) -> Lesson:
    question, trajectories = sound[0].question, [e.trajectory for e in sound]
    if not asks_the_same(sound):
        return Lesson(cause="different_questions")
    verdict = vote(trajectories, (), evolution, question, now, _equality(question, rewards))
    elected = {v.id for v in verdict.votes if v.elected}
    teacher = next((e for e in sound if e.trajectory.id in elected), sound[0])
    group = _group(question, trajectories)
    task = make_task(group, verdict, evolution, rewards, now, teacher.id)
    if task is None:
        return Lesson(verdict=verdict, cause=verdict.reason or "unclear")
    return Lesson(task, verdict)


def asks_the_same(experiences: Sequence[Experience]) -> bool:
    """Whether the episodes began with the same messages and pictures."""
    questions = [e.question for e in experiences]
    return len({(q.system, q.conversation, *(m.uri for m in q.media)) for q in questions}) == 1


def bounded(rewards: Sequence[float]) -> list[float]:
    """The rewards of a group less the lowest, divided by their range if that is above 1.

    In 0..1, whatever the scale of the client and the advantage of the run.
    """
    low, high = min(rewards), max(rewards)
    span = max(high - low, 1.0)
    return [(reward - low) / span for reward in rewards]


def says_its_answer(trajectory: Trajectory) -> bool:
    """Whether the policy wrote the answer, which a client may give with a reward."""
    said = trajectory.replies[-1].text if trajectory.replies else ""
    return canonical(trajectory.answer or "") in canonical(said)


def _group(question: Question, trajectories: Sequence[Trajectory]) -> Group:
    id = trajectories[0].group_id
    own = [t.model_copy(update={"question_id": question.id, "group_id": id}) for t in trajectories]
    version = min(t.policy_version for t in own)
    return Group(id=id, question=question, trajectories=own, policy_version=version)


def _equality(question: Question, rewards: RewardsConfig) -> Equality:
    return Equality(question, rewards.scorer_of(question.task, question.scorer), shared_services(rewards))
