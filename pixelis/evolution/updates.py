"""Turns verdicts into update tasks: trajectories scored against the pseudo-label."""

from __future__ import annotations

import math
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
    task = label_group(group, verdict.answer, rewards)
    details: dict[str, Any] = {"confidence": verdict.confidence, "experience_id": experience_id, "user": user}
    details["created_at"] = time.time() if now is None else now
    return task.model_copy(update=details)


def label_group(group: Group, label: str, rewards: RewardsConfig) -> UpdateTask:
    """The task of a group scored against a label, or by the outcomes of its trajectories where they have one."""
    unscored = _without_labels(group)
    scored = unscored if rewards.needs_scorer else score_group(unscored, rewards, truths=[label])
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
        pseudo_label=label,
        confidence=0.0,
        created_at=0.0,
    )


def priority(verdict: Verdict) -> float:
    """The priority of an experience: higher with an uncertain answer."""
    return 0.5 * (1 - verdict.confidence) + 0.25


def relabel(task: UpdateTask, question: Question, label: str, rewards: RewardsConfig) -> UpdateTask:
    """The task scored against a reviewer's label, which overrides outcomes. Raises BadInput ``blank_answer``."""
    if not canonical(label):
        raise BadInput(
            "a blank answer is no label",
            code="blank_answer",
            fix="give the right answer, or reject the update",
        )
    trajectories = [t.model_copy(update={"outcome": None}) for t in task.trajectories]
    group = as_question_group(task.model_copy(update={"trajectories": trajectories}), question)
    scored = group if rewards.needs_scorer else score_group(group, rewards, truths=[label])
    return task.model_copy(update={"trajectories": scored.trajectories, "pseudo_label": label})


def as_question_group(task: UpdateTask, question: Question | None) -> Group:
    """The task as an unscored group without labels; its question is empty if unknown."""
    group = as_group(task)
    if question is not None:
        group = group.model_copy(update={"question": question.model_copy(update={"id": task.question_id})})
    return _without_labels(group)


def _without_labels(group: Group) -> Group:
    """A copy without true answers, and without rewards and advantages computed from them."""
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
    """The trajectories that gave the label, or of rewarded ones the best.

    Others looked elsewhere: their pictures do not show it.
    """
    rewarded = [t.reward for t in trajectories if t.outcome is not None and t.reward is not None]
    best = max(rewarded, default=math.inf)

    def agreed(trajectory: Trajectory) -> bool:
        if rewarded:
            return trajectory.reward == best
        scored = trajectory.rewards.get("accuracy", 0.0) >= 1.0  # against the label, by the question's scorer
        return trajectory.answer is not None and (scored or agrees(trajectory.answer, label))

    return [t for t in trajectories if agreed(t) and t.turns[-1].is_policy]


def speaking_for(task: UpdateTask) -> set[str]:
    """Ids of the task's experiences whose answer is its label: feedback on them is about the label."""
    own = {task.experiences.get(t.id, "") for t in task.trajectories if agrees(t.answer, task.pseudo_label)}
    return (own | {task.experience_id}) - {""}
