"""Turns verdicts into learner tasks: trajectories scored against the pseudo-label, in a bounded queue."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from pixelis.config import EvolutionConfig, RewardsConfig
from pixelis.errors import BadInput
from pixelis.evolution.gate import gate
from pixelis.records import Group, ImageView, Question, Trajectory, UpdateTask, Verdict
from pixelis.rewards.scorers import canonical
from pixelis.rewards.terms import score_group

Item = TypeVar("Item")


def make_task(
    group: Group,
    verdict: Verdict,
    evolution: EvolutionConfig,
    rewards: RewardsConfig,
    now: float | None = None,
    experience_id: str = "",
) -> UpdateTask | None:
    """The update task of a served group, or None when the gate is closed.

    Each *sampled* trajectory is scored by its own answer against the verdict's (never the consensus against itself), with
    the terms of rft. Accepted truths (``Question.answers``) are cut off before anything looks at the question: labels
    cannot leak. Source: TTRL section 3 of its paper; ``now`` in seconds since the epoch.
    """
    if verdict.answer is None or not gate(verdict, evolution):
        return None
    scored = score_group(blind(group), rewards, truths=[verdict.answer])
    return UpdateTask(
        question_id=group.question.id,
        trajectories=[_light(t) for t in scored.trajectories],
        pseudo_label=verdict.answer,
        confidence=verdict.confidence,
        created_at=time.time() if now is None else now,
        experience_id=experience_id,
    )


def relabel(task: UpdateTask, question: Question, label: str, rewards: RewardsConfig) -> UpdateTask:
    """The task scored anew against another label, a reviewer's; all else stays, its id and the confidence of the vote too."""
    if not canonical(label):
        raise BadInput("a blank answer is no label", code="blank_answer", fix="give the right answer, or reject the update")
    first = task.trajectories[0]
    asked = question.model_copy(update={"id": task.question_id})
    group = Group(id=first.group_id, question=asked, trajectories=task.trajectories, policy_version=first.policy_version)
    scored = score_group(blind(group), rewards, truths=[label])
    return task.model_copy(update={"trajectories": scored.trajectories, "pseudo_label": label})


def blind(group: Group) -> Group:
    """A copy without truths, and without rewards or advantages that truths may have given."""
    cleared: dict[str, Any] = {"rewards": {}, "weighted": {}, "reward": None, "unscored": None, "advantage": None}
    return group.model_copy(
        update={
            "question": unlabelled(group.question),
            "trajectories": [t.model_copy(update=cleared) for t in group.trajectories],
        }
    )


def unlabelled(question: Question) -> Question:
    """What may be known of a question without its truth: no answers, no annotations, of ``meta`` the options alone."""
    meta = {"options": question.meta["options"]} if "options" in question.meta else {}
    return question.model_copy(update={"answers": None, "annotations": None, "meta": meta})


def as_group(task: UpdateTask) -> Group:
    """The task as the learner's unit. The question's text and pictures stay behind: tokens and views say it all."""
    first = task.trajectories[0]
    meta = {"pseudo_label": task.pseudo_label}
    question = Question(id=task.question_id, question="", task="evolution", split="serve", meta=meta)
    return Group(id=first.group_id, question=question, trajectories=task.trajectories, policy_version=first.policy_version)


def elected(trajectories: Sequence[Trajectory], label: str) -> list[tuple[Trajectory, bool]]:
    """Each answered episode as it would end had it given the elected answer, and whether it did.

    An answer's reward is known for every answer there is, not only for the sampled one: 1 for the elected, 0 for others. So its
    policy gradient needs no sampling; its expectation points from whatever was said to the elected answer, as the episode sees
    the picture. An episode that said something else ends with the last turn of the first that said it; behaviour
    log-probabilities of that turn are gone. Empty when none said it.
    """
    key = canonical(label)
    agreeing = [t for t in trajectories if t.answer is not None and canonical(t.answer) == key]
    if not agreeing:
        return []
    said = agreeing[0].turns[-1].model_copy(update={"log_probs": []})
    out = []
    for t in trajectories:
        if t.answer is None or not t.turns[-1].is_policy:
            continue
        agrees = canonical(t.answer) == key
        out.append((t if agrees else t.model_copy(update={"turns": [*t.turns[:-1], said], "answer": agreeing[0].answer}), agrees))
    return out


def _light(trajectory: Trajectory) -> Trajectory:
    """Without inline pictures: a caller's data URL would otherwise travel once per sample."""

    def named(view: ImageView) -> ImageView:
        return view.model_copy(update={"uri": ""}) if view.uri.startswith("data:") else view

    return trajectory.model_copy(update={"images": [named(view) for view in trajectory.images]})


class DropOldest(Generic[Item]):
    """A queue of at most ``limit`` items: when full, the oldest makes room, because fresh traffic says more."""

    def __init__(self, limit: int):
        self.items: deque[Item] = deque(maxlen=limit)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self.items)

    def push(self, item: Item) -> None:
        """Append; counts the item it pushed out, if any."""
        self.dropped += len(self.items) == self.items.maxlen
        self.items.append(item)

    def take(self, count: int) -> list[Item]:
        """Up to ``count`` items, oldest first."""
        return [self.items.popleft() for _ in range(min(count, len(self.items)))]

    def remove(self, unwanted: Callable[[Item], bool]) -> int:
        """Take out what is unwanted, keep the order of the rest; returns how many went."""
        kept = [item for item in self.items if not unwanted(item)]
        gone = len(self.items) - len(kept)
        self.items = deque(kept, maxlen=self.items.maxlen)
        return gone
