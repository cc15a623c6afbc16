"""Metrics of several samples per question (avg@k, pass@k, maj@k), and accuracies by tool use, split, task and category."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pixelis.config import RewardsConfig
from pixelis.records import Group, Trajectory
from pixelis.rewards.equality import Equality, classes
from pixelis.rewards.extraction import answers_of
from pixelis.rewards.services import Services


def sample_metrics(groups: Sequence[Group], rewards: RewardsConfig, services: Services) -> dict[str, Any]:
    """``k``, the most samples of a question; ``avg@k``, ``pass@k`` and ``maj@k``: means over the scored questions.

    avg: mean score (Mini-o3's Avg@32, TTRL's pass@1 of 16). pass: whether a sample scores more than one half; ``pass`` estimates
    it for 1, 2, 4, ... samples. maj: score of the majority's first answer, whose classes follow the reward's equality; 0 without
    an answer. Empty for questions with one sample.
    """
    k = max((len(group.trajectories) for group in groups), default=0)
    scored = [(group, scores) for group in groups if (scores := _scores(group.trajectories))]
    if k < 2 or not scored:
        return {}
    return {
        "k": k,
        "avg@k": statistics.fmean(statistics.fmean(scores.values()) for _, scores in scored),
        "pass@k": statistics.fmean(any(score > 0.5 for score in scores.values()) for _, scores in scored),
        "maj@k": statistics.fmean(_majority_score(group, scores, rewards, services) for group, scores in scored),
        "pass": _pass_curve([(sum(s > 0.5 for s in scores.values()), len(scores)) for _, scores in scored]),
    }


def _pass_curve(questions: Sequence[tuple[int, int]]) -> dict[str, float]:
    """pass@1, 2, 4, ... of questions with (right, scored) samples, up to the fewest samples of a question."""
    fewest = min(n for _, n in questions)
    numbers = [1 << i for i in range(fewest.bit_length())]
    return {str(k): statistics.fmean(pass_at(right, n, k) for right, n in questions) for k in numbers}


def pass_at(right: int, n: int, k: int) -> float:
    """Probability that one of k of n samples is right, ``right`` of the n being so; unbiased (Codex, arXiv 2107.03374)."""
    if not 0 <= right <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {right} right of {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def breakdown(groups: Sequence[Group]) -> dict[str, Any]:
    """Accuracy and number of the episodes with and without operations, and by ``splits``, ``tasks`` and ``categories``.

    An episode with operations has executed one (Mini-o3). The category is ``meta.category``. The last three are left out where
    all questions have the same.
    """
    episodes = [(group, t) for group in groups for t in group.trajectories]
    result: dict[str, Any] = {
        "with_operations": _accuracy([t for _, t in episodes if t.operations_ok]),
        "without_operations": _accuracy([t for _, t in episodes if not t.operations_ok]),
    }
    keys: dict[str, Callable[[Group], str]] = {
        "splits": lambda g: g.question.split,
        "tasks": lambda g: g.question.task,
        "categories": category_of,
    }
    for name, key in keys.items():
        if len(names := sorted({key(group) for group in groups} - {""})) > 1:
            result[name] = {value: _accuracy([t for g, t in episodes if key(g) == value]) for value in names}
    return result


def category_of(group: Group) -> str:
    """``meta.category`` of the question, of benchmarks with categories such as V*; empty without."""
    category = group.question.meta.get("category")
    return category if isinstance(category, str) else ""


def _accuracy(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    scores = list(_scores(trajectories).values())
    return {"accuracy": statistics.fmean(scores) if scores else None, "n": len(scores)}


def _scores(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    return {t.id: t.rewards["accuracy"] for t in trajectories if "accuracy" in t.rewards}


def _majority_score(group: Group, scores: dict[str, float], rewards: RewardsConfig, services: Services) -> float:
    question = group.question
    answers = answers_of(group.trajectories, rewards, services)
    same = Equality(question, rewards.scorer_of(question.task, question.scorer), services)
    names = classes(answers.values(), same)
    ranked = Counter(name for name in names if name is not None).most_common(1)
    if not ranked:
        return 0.0
    members = [t.id for t, name in zip(group.trajectories, names, strict=True) if name == ranked[0][0] and t.id in scores]
    return scores[members[0]] if members else 0.0
