"""Metrics of a set of episodes: accuracy with its interval, tool use, stop reasons."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from pixelis.evaluation.statistics import bootstrap_mean, wilson
from pixelis.records import Group, Trajectory


def summarise(items: Iterable[Group | Trajectory], *, interval: bool = True) -> dict[str, Any]:
    """Summarise a set of episodes.

    - `accuracy`: mean of the raw reward term over the `n` scored episodes, None without any. `unscored` ones
      are counted by cause and never as wrong.
    - `ci95`, if `interval`: see `interval_of`.
    - `rapr`: rate of pixel reasoning (Pixel-Reasoner), the share of episodes with an executed operation.
    - `operations`, `tool_error_rate`: number of requested operations, and share of them that failed.
    - `questions`: number with a scored episode. `turns`, `seconds`: means per episode.
    """
    episodes = _flatten(items)
    scores, unscored = _scores(episodes)
    values = [value for of_question in scores.values() for value in of_question]
    counts = [operation_counts(episode) for episode in episodes]
    requested, failed = sum(n for n, _ in counts), sum(n for _, n in counts)
    stops = Counter(episode.stop_reason.value for episode in episodes)
    return {
        "accuracy": sum(values) / len(values) if values else None,
        **({"ci95": list(interval_of(scores))} if interval else {}),
        "n": len(values),
        "questions": len(scores),
        "unscored": dict(unscored),
        "rapr": _mean([float(episode.operations_ok > 0) for episode in episodes]),
        "operations": requested,
        "tool_error_rate": failed / requested if requested else 0.0,
        "turns": _mean([float(episode.policy_turns) for episode in episodes]),
        "stop_reasons": dict(stops.most_common()),
        "seconds": _mean([episode.seconds for episode in episodes]),
    }


def evaluation_metrics(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of an evaluation during training: means over the sets, and the accuracy of each named set.

    summaries: `summarise` of each set by name.
    """
    metrics: dict[str, float] = {}
    for key in ("accuracy", "rapr", "tool_error_rate", "turns"):
        if values := [summary[key] for summary in summaries.values() if summary[key] is not None]:
            metrics[f"evaluate/{key}"] = sum(values) / len(values)
    return metrics | {
        f"evaluate/accuracy_{name}": summary["accuracy"]
        for name, summary in summaries.items()
        if name and summary["accuracy"] is not None
    }


def correctness(items: Iterable[Group | Trajectory]) -> dict[str, float]:
    scores, _ = _scores(_flatten(items))
    return {question: sum(values) / len(values) for question, values in scores.items()}


def has_loop(calls: Sequence[Hashable]) -> bool:
    """Whether two or more calls in a row are repeated at once, as A B A B."""
    n = len(calls)
    return any(
        list(calls[start : start + size]) == list(calls[start + size : start + 2 * size])
        for size in range(2, n // 2 + 1)
        for start in range(n - 2 * size + 1)
    )


def exploration_efficiency(calls: Sequence[Hashable]) -> float:
    """Share of different calls, times 0.9 beyond 15 calls and 0.8 beyond 20; 1 without calls."""
    if not calls:
        return 1.0
    return len(set(calls)) / len(calls) * (0.8 if len(calls) > 20 else 0.9 if len(calls) > 15 else 1.0)


def calls_of(trajectory: Trajectory) -> list[tuple[str, str, str]]:
    return [
        (action.op, action.target, json.dumps(action.arguments, sort_keys=True, default=str))
        for turn in trajectory.replies
        for action in turn.actions
    ]


def operation_counts(trajectory: Trajectory) -> tuple[int, int]:
    """Numbers of requested and failed operations of an episode.

    Invalid calls count; those that a limit prevented (`over_turn`, `over_context`) did not fail.
    """
    requested = failed = 0
    for i, turn in enumerate(trajectory.turns):
        broken = turn.error not in (None, "bad_token")  # a banned token is an engine failure, not a call
        if not turn.is_policy or (turn.action is None and not broken):
            continue
        calls = max(len(turn.actions), 1)
        replies = [later.observation for later in trajectory.turns[i + 1 : i + 1 + calls]] or [
            turn.observation
        ]
        requested += calls
        failed += broken or sum(reply is not None and reply.status == "error" for reply in replies)
    return requested, failed


def _scores(episodes: Iterable[Trajectory]) -> tuple[dict[str, list[float]], Counter[str]]:
    """Accuracies of the scored episodes by question, and the number of the others by cause."""
    scores: dict[str, list[float]] = defaultdict(list)
    unscored: Counter[str] = Counter()
    for episode in episodes:
        if "accuracy" in episode.rewards:
            scores[episode.question_id].append(episode.rewards["accuracy"])
        else:
            unscored[episode.unscored or "not_scored"] += 1
    return scores, unscored


def interval_of(scores: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """The 95 % interval of the accuracy of ``scores`` by question.

    Wilson's if every question has one right-or-wrong episode, else a bootstrap over questions, because
    episodes of one question are not independent.
    """
    values = [value for of_question in scores.values() for value in of_question]
    binary = all(value in (0.0, 1.0) for value in values)
    if (binary and len(values) == len(scores)) or len(scores) < 2:
        return wilson(round(sum(values)), len(values)) if binary else (0.0, 1.0)
    return bootstrap_mean([sum(v) / len(v) for v in scores.values()])


def _flatten(items: Iterable[Group | Trajectory]) -> list[Trajectory]:
    return [t for item in items for t in (item.trajectories if isinstance(item, Group) else [item])]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
