"""Difficulty of demonstrations, and the split of a set by it (Pixelis, arXiv 2603.25091)."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pixelis.datasets.refinement.actions import THINK, actions, location
from pixelis.records import Demonstration, Level

WEIGHTS = {"length": 0.30, "operations": 0.25, "reasoning": 0.20, "errors": 0.15, "task": 0.10}
COSTS = {
    "track_object": 3,
    "segment_object_at": 3,
    "get_properties": 2,
    "zoom_in": 2,
    "read_text": 1,
    THINK: 0.5,
}
OTHER_COST = 2
"""The cost of operations that the paper does not list, such as select_frames, which resemble zooms."""
KINDS = {"outcome_negative": 0.1, "trap_perceptual": 0.2, "trap_logical": 0.25, "self_correction": 0.15}
TASKS = (
    (1.0, ("temporal", "track", "frame", "video", "event", "moment")),
    (0.8, ("geometric", "compar")),
    (0.7, ("spatial",)),
    (0.6, ("relation",)),
    (0.5, ("attribute",)),
    (0.4, ("count",)),
    (0.3, ("text", "ocr", "read")),
)
"""Difficulty of a task by parts of its name; the first match counts."""
OTHER_TASK = 0.5

CORRECTION = re.compile(
    r"\b(wait|actually|mistake|mistaken|wrong|correct (this|that|it|myself)|let me (re|try "
    r"again|correct)|re-?(check|crop|"
    r"select|examine|consider|do)\w*|look(ing)? again|try(ing)? again|that is not|that's not|not "
    r"what|instead|missed|"
    r"should (not )?have)\b",
    re.IGNORECASE,
)
"""Words by which a thought corrects something."""

LEVELS: tuple[Level, ...] = ("simple", "medium", "hard")
CUTS = (33, 66)
IQR = 1.5


def score(demonstration: Demonstration) -> float:
    parts = components(demonstration)
    return min(1.0, max(0.1, sum(weight * parts[name] for name, weight in WEIGHTS.items())))


def components(d: Demonstration) -> dict[str, float]:
    names = actions(d)
    n, operations, share = len(names), 0.3, 0.0
    if n:
        operations = sum(COSTS.get(name, OTHER_COST) for name in names) / (3 * n) + 0.2 * len(set(names)) / n
        share = names.count(THINK) / n
    thoughts, ops = " ".join(turn.think or "" for turn in d.turns), [step.op for step in d.steps]
    triples = sum(a == b == c for a, b, c in zip(ops, ops[1:], ops[2:], strict=False))
    places = [place for step in d.steps if (place := location(step)) is not None]
    revisited = len(set(places)) < len(places)
    return {
        "length": math.log(n + 1) / math.log(16) if n >= 2 else 0.1,
        "operations": operations,
        "reasoning": share / 0.2 if share < 0.2 else 1.0 if share <= 0.6 else 1 - 0.3 * (share - 0.6) / 0.4,
        "errors": 0.3 * bool(CORRECTION.search(thoughts))
        + 0.2 * triples
        + 0.2 * revisited
        + KINDS.get(d.kind, 0.0),
        "task": task_difficulty(d.task),
    }


def task_difficulty(task: str) -> float:
    name = task.casefold()
    return next((value for value, parts in TASKS if any(part in name for part in parts)), OTHER_TASK)


def outliers(scores: Sequence[float]) -> list[bool]:
    """True for scores more than 1.5 interquartile ranges outside the quartiles."""
    if not scores:
        return []
    low, high = np.percentile(scores, (25, 75))
    reach = IQR * (high - low) + 1e-12
    return [bool(value < low - reach or value > high + reach) for value in scores]


def split(scores: Sequence[float], ids: Sequence[str]) -> list[Level]:
    """The level of each score: simple below the 33rd percentile, hard above the 66th, otherwise medium.

    A hash of the ids ranks equal scores, so that levels keep their shares in any order of the set.
    """
    order = sorted(
        range(len(scores)), key=lambda i: (round(scores[i], 9), hashlib.sha256(ids[i].encode()).digest())
    )
    levels: list[Level] = ["medium"] * len(scores)
    for rank, i in enumerate(order):
        percentile = 100 * (rank + 0.5) / len(scores)
        levels[i] = "simple" if percentile <= CUTS[0] else "hard" if percentile > CUTS[1] else "medium"
    return levels


def grade(demonstrations: Iterable[Demonstration]) -> list[tuple[float, Level | None]]:
    scores, ids = [], []
    for d in demonstrations:
        scores.append(round(score(d), 6))
        ids.append(d.id)
    inside = [i for i, outside in enumerate(outliers(scores)) if not outside]
    levels = dict(zip(inside, split([scores[i] for i in inside], [ids[i] for i in inside]), strict=True))
    return [(value, levels.get(i)) for i, value in enumerate(scores)]


def statistics(demonstrations: Iterable[Demonstration]) -> dict[str, Any]:
    graded = [(d.level, d.difficulty or 0.0, len(actions(d)), d.task) for d in demonstrations]
    result: dict[str, Any] = {}
    for level in LEVELS:
        scores, lengths, tasks = [], list[int](), Counter[str]()
        for own_level, value, length, task in graded:
            if own_level == level:
                scores.append(value)
                lengths.append(length)
                tasks[task] += 1
        result[level] = {
            "count": len(scores),
            "share": round(len(scores) / len(graded), 4) if graded else 0.0,
            "difficulty": round(float(np.mean(scores)), 4) if scores else None,
            "length": round(float(np.mean(lengths)), 2) if lengths else None,
            "tasks": dict(tasks.most_common()),
        }
    return result
