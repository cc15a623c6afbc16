"""Turns verdicts into update tasks: trajectories scored against the pseudo-label."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pixelis.config import EvolutionConfig, RewardsConfig
from pixelis.errors import BadInput
from pixelis.evolution.gate import gate
from pixelis.records import Group, Question, Trajectory, UpdateTask, Verdict
from pixelis.rewards.scorers import canonical
from pixelis.rewards.terms import score_group
from pixelis.rewards.vote import agrees


def make_task(
    group: Group,
    verdict: Verdict,
    evolution: EvolutionConfig,
    rewards: RewardsConfig,
    now: float | None = None,
    experience_id: str = "",
    user: str = "",
) -> UpdateTask | None:
    """The update task of a served group, or None if the gate is closed.

    Each *sampled* trajectory is scored against the verdict's answer, unless ``rewards.needs_scorer``. True
    answers are removed first. ``user`` is a pseudonym. Source: TTRL (arXiv 2504.16084), section 3.
    """
    if verdict.answer is None or not gate(verdict, evolution):
        return None
    unscored = _without_labels(group)
    scored = unscored if rewards.needs_scorer else score_group(unscored, rewards, truths=[verdict.answer])
    trajectories = []
    for trajectory in scored.trajectories:
        # Inline pictures would travel once per sample.
        images = [
            i.model_copy(update={"uri": ""}) if i.uri.startswith("data:") else i for i in trajectory.images
        ]
        trajectories.append(trajectory.model_copy(update={"images": images}))
    return UpdateTask(
        question_id=group.question.id,
        trajectories=trajectories,
        pseudo_label=verdict.answer,
        confidence=verdict.confidence,
        created_at=time.time() if now is None else now,
        experience_id=experience_id,
        user=user,
    )


def relabel(task: UpdateTask, question: Question, label: str, rewards: RewardsConfig) -> UpdateTask:
    """The task scored against a reviewer's label. Raises BadInput ``blank_answer``."""
    if not canonical(label):
        raise BadInput(
            "a blank answer is no label",
            code="blank_answer",
            fix="give the right answer, or reject the update",
        )
    group = as_question_group(task, question)
    scored = group if rewards.needs_scorer else score_group(group, rewards, truths=[label])
    return task.model_copy(update={"trajectories": scored.trajectories, "pseudo_label": label})


def as_question_group(task: UpdateTask, question: Question | None) -> Group:
    """The task as an unscored group without labels; its question is empty if unknown."""
    group = as_group(task)
    if question is not None:
        group = group.model_copy(update={"question": question.model_copy(update={"id": task.question_id})})
    return _without_labels(group)


def _without_labels(group: Group) -> Group:
    cleared: dict[str, Any] = {"rewards": {}, "weighted": {}}
    cleared |= dict.fromkeys(("reward", "unscored", "advantage"))
    return group.model_copy(
        update={
            "question": unlabelled(group.question),
            "trajectories": [t.model_copy(update=cleared) for t in group.trajectories],
        }
    )


def unlabelled(question: Question) -> Question:
    """A copy without answers and annotations; ``meta`` keeps the options only."""
    meta = {"options": question.meta["options"]} if "options" in question.meta else {}
    return question.model_copy(update={"answers": None, "annotations": None, "meta": meta})


def as_group(task: UpdateTask) -> Group:
    """The task as a group for the learner; tokens and views hold the question's text and pictures."""
    first = task.trajectories[0]
    meta = {"pseudo_label": task.pseudo_label}
    question = Question(id=task.question_id, question="", task="evolution", split="serve", meta=meta)
    return Group(
        id=first.group_id,
        question=question,
        trajectories=task.trajectories,
        policy_version=first.policy_version,
    )


def agreeing(trajectories: Sequence[Trajectory], label: str) -> list[Trajectory]:
    """The trajectories that gave the label. Others looked elsewhere: their pictures do not show it."""

    def agreed(trajectory: Trajectory) -> bool:
        scored = trajectory.rewards.get("accuracy", 0.0) >= 1.0  # against the label, by the question's scorer
        return trajectory.answer is not None and (scored or agrees(trajectory.answer, label))

    return [t for t in trajectories if agreed(t) and t.turns[-1].is_policy]
