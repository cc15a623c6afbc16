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

    - `accuracy`: mean of the raw reward term `accuracy` over the `n` scored episodes, None without any.
      Unscored episodes are
      counted by cause in `unscored` and never as wrong.
    - `ci95`, if `interval`: see `interval_of`.
    - `rapr`: rate of pixel reasoning (Pixel-Reasoner), the share of episodes with at least one executed
      operation.
    - `operations`: number of requested operations. `tool_error_rate`: the share of them that failed, see
      `operation_counts`.
    - `questions`: number with a scored episode. `stop_reasons`: count by reason.
    - `turns`, `seconds`: mean policy turns and mean wall seconds per episode.
    """
    episodes = list(_flatten(items))
    scores, unscored = _scores(episodes)
    values = [value for of_question in scores.values() for value in of_question]
    requested, failed = (
        (sum(counts) for counts in zip(*map(operation_counts, episodes), strict=True)) if episodes else (0, 0)
    )
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
    """Metrics of an evaluation during training from the `summarise` of each set by name.

    Means over the sets that have a value, and the accuracy of each set that has a name.
    """
    metrics: dict[str, float] = {}
    for key in ("accuracy", "rapr", "tool_error_rate", "turns"):
        if values := [summary[key] for summary in summaries.values() if summary[key] is not None]:
            metrics[f"evaluate/{key}"] = sum(values) / len(values)
    named = {
        name: summary["accuracy"]
        for name, summary in summaries.items()
        if name and summary["accuracy"] is not None
    }
    return metrics | {f"evaluate/accuracy_{name}": accuracy for name, accuracy in named.items()}


def correctness(items: Iterable[Group | Trajectory]) -> dict[str, float]:
    """Question id -> mean accuracy of its scored episodes, for `statistics.paired_bootstrap`."""
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
    """Share of different calls; times .9 beyond 15 calls, times .8 beyond 20. 1 without calls."""
    if not calls:
        return 1.0
    return len(set(calls)) / len(calls) * (0.8 if len(calls) > 20 else 0.9 if len(calls) > 15 else 1.0)


def calls_of(trajectory: Trajectory) -> list[tuple[str, str, str]]:
    """The calls of an episode in order, as operation, target and arguments."""
    return [
        (action.op, action.target, json.dumps(action.arguments, sort_keys=True, default=str))
        for turn in trajectory.turns
        if turn.is_policy
        for action in turn.actions
    ]


def operation_counts(trajectory: Trajectory) -> tuple[int, int]:
    """Numbers of requested and failed operations of an episode.

    Every policy turn with a call, valid or not, is a request. Invalid calls and calls with an error
    observation failed. Calls that a limit prevented (`over_turn`, `over_context`) were requested and did not
    fail.
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

    Wilson's if every question has one right-or-wrong episode, else a bootstrap over questions: episodes of
    one question are not independent.
    """
    values = [value for of_question in scores.values() for value in of_question]
    binary = all(value in (0.0, 1.0) for value in values)
    if (binary and len(values) == len(scores)) or len(scores) < 2:
        return wilson(round(sum(values)), len(values)) if binary else (0.0, 1.0)
    return bootstrap_mean([sum(v) / len(v) for v in scores.values()])


def _flatten(items: Iterable[Group | Trajectory]) -> Iterable[Trajectory]:
    for item in items:
        if isinstance(item, Group):
            yield from item.trajectories
        else:
            yield item


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
