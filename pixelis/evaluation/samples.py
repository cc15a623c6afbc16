"""Metrics of several samples per question, and accuracies by tool use, split, task and category."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pixelis.config import RewardsConfig
from pixelis.evaluation.metrics import interval_of
from pixelis.records import Group, Trajectory
from pixelis.rewards.equality import Equality, classes
from pixelis.rewards.extraction import answers_of
from pixelis.rewards.scorers import number
from pixelis.rewards.services import Services


def sample_metrics(groups: Sequence[Group], rewards: RewardsConfig, services: Services) -> dict[str, Any]:
    """``k``, the most samples of a question, and means over scored questions; empty if all have one sample.

    - ``avg@k``: mean score (Mini-o3's Avg@32, TTRL's pass@1 of 16).
    - ``pass@k``: whether a sample scores above 0.5; ``pass`` estimates it for 1, 2, 4, ... samples.
    - ``maj@k``: score of the first answer of the majority, 0 without an answer.
    - ``ci95@k``: bootstrap intervals over questions.
    """
    k = max((len(group.trajectories) for group in groups), default=0)
    accuracies = (
        {t.id: t.rewards["accuracy"] for t in group.trajectories if "accuracy" in t.rewards}
        for group in groups
    )
    scored = [(group, scores) for group, scores in zip(groups, accuracies, strict=True) if scores]
    if k < 2 or not scored:
        return {}
    values: dict[str, list[float]] = {
        "avg@k": [statistics.fmean(scores.values()) for _, scores in scored],
        "pass@k": [float(any(score > 0.5 for score in scores.values())) for _, scores in scored],
        "maj@k": [_majority_score(group, scores, rewards, services) for group, scores in scored],
    }
    right = [(sum(score > 0.5 for score in scores.values()), len(scores)) for _, scores in scored]
    powers = [1 << i for i in range(min(n for _, n in right).bit_length())]
    return {
        "k": k,
        **{name: statistics.fmean(of_questions) for name, of_questions in values.items()},
        "ci95@k": {
            name: list(interval_of({str(i): [value] for i, value in enumerate(of_questions)}))
            for name, of_questions in values.items()
        },
        "pass": {str(power): statistics.fmean(pass_at(r, n, power) for r, n in right) for power in powers},
    }


def pass_at(right: int, n: int, k: int) -> float:
    """Unbiased probability that one of k of n samples is right (Codex, arXiv 2107.03374)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def seed_metrics(groups: Sequence[Group], seeds: Sequence[int], samples: int) -> dict[str, Any]:
    """Accuracy by seed of groups with ``samples`` episodes of each; empty for fewer than two seeds."""
    if len(seeds) < 2:
        return {}
    by_seed = {}
    for place, seed in enumerate(seeds):
        part = slice(place * samples, (place + 1) * samples)
        by_seed[str(seed)] = _accuracy(
            [(group.question.id, t) for group in groups for t in group.trajectories[part]]
        )
    known = [scores["accuracy"] for scores in by_seed.values() if scores["accuracy"] is not None]
    spread = (
        {"seed_mean": statistics.fmean(known), "seed_std": statistics.stdev(known)} if len(known) > 1 else {}
    )
    return {"seeds": by_seed, **spread}


def breakdown(groups: Sequence[Group]) -> dict[str, Any]:
    """Accuracy by use of operations (Mini-o3), ``splits``, ``tasks``, ``categories`` and ``lengths`` in turns.

    The last four are left out where all questions or episodes have the same.
    """
    episodes = [(group, t) for group in groups for t in group.trajectories]
    result: dict[str, Any] = {
        "with_operations": _accuracy([(g.question.id, t) for g, t in episodes if t.operations_ok]),
        "without_operations": _accuracy([(g.question.id, t) for g, t in episodes if not t.operations_ok]),
    }
    keys: dict[str, Callable[[Group], Sequence[str]]] = {
        "splits": lambda g: [g.question.split],
        "tasks": lambda g: [g.question.task],
        "categories": categories_of,
    }
    for name, key in keys.items():
        if len(names := sorted({value for group in groups for value in key(group)} - {""})) > 1:
            members = {value: [(g.question.id, t) for g, t in episodes if value in key(g)] for value in names}
            result[name] = {value: _accuracy(of_value) for value, of_value in members.items()}
    if len(lengths := sorted({t.policy_turns for _, t in episodes})) > 1:
        result["lengths"] = {
            f"{n} turn{'s' * (n != 1)}": _accuracy(
                [(g.question.id, t) for g, t in episodes if t.policy_turns == n]
            )
            for n in lengths
        }
    return result


def count_errors(groups: Sequence[Group], answers: Mapping[str, str | None]) -> dict[str, Any]:
    """Mean absolute error and RMSE of the counts (TallyQA); empty without numbers."""
    errors = [
        min(abs(value - truth) for truth in truths)
        for group in groups
        if group.question.scorer == "count" and (truths := _numbers(group.question.answers or []))
        for t in group.trajectories
        for value in _numbers([answers.get(t.id) or ""])
    ]
    if not errors:
        return {}
    rmse = math.sqrt(statistics.fmean(error * error for error in errors))
    return {"count_errors": {"mae": statistics.fmean(errors), "rmse": rmse, "n": len(errors)}}


def _numbers(texts: Sequence[str]) -> list[float]:
    return [value for text in texts if (value := number(text)) is not None]


def categories_of(group: Group) -> list[str]:
    """``meta.category`` of the question, of benchmarks with categories such as V*."""
    category = group.question.meta.get("category")
    values = category if isinstance(category, list) else [category]
    return [value for value in values if isinstance(value, str) and value]


def category_of(group: Group) -> str:
    return "_".join(categories_of(group))


def question_rows(groups: Sequence[Group], answers: Mapping[str, str | None]) -> Iterator[dict[str, Any]]:
    """What the episodes of each question answered and scored; None where they are ``unscored``."""
    for group in groups:
        question, trajectories = group.question, group.trajectories
        yield {
            "id": question.id,
            "task": question.task,
            "split": question.split,
            "categories": categories_of(group),
            "truths": question.answers,
            "answers": [answers.get(t.id) for t in trajectories],
            "scores": [t.rewards.get("accuracy") for t in trajectories],
            "operations": [t.operations_ok for t in trajectories],
            "unscored": [t.unscored for t in trajectories],
        }


def _accuracy(episodes: Sequence[tuple[str, Trajectory]]) -> dict[str, Any]:
    scores = defaultdict[str, list[float]](list)
    for question, t in episodes:
        if "accuracy" in t.rewards:
            scores[question].append(t.rewards["accuracy"])
    values = [value for of_question in scores.values() for value in of_question]
    if not values:
        return {"accuracy": None, "ci95": None, "n": 0}
    return {"accuracy": statistics.fmean(values), "ci95": list(interval_of(scores)), "n": len(values)}


def _majority_score(
    group: Group, scores: dict[str, float], rewards: RewardsConfig, services: Services
) -> float:
    question = group.question
    answers = answers_of([group], rewards, services)
    same = Equality(question, rewards.scorer_of(question.task, question.scorer), services)
    names = classes(answers.values(), same)
    ranked = Counter(name for name in names if name is not None).most_common(1)
    if not ranked:
        return 0.0
    members = [
        t.id
        for t, name in zip(group.trajectories, names, strict=True)
        if name == ranked[0][0] and t.id in scores
    ]
    return scores[members[0]] if members else 0.0
