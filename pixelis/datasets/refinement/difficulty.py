"""How hard a demonstration is, and the split of a set into simple, medium and hard.

Score = .30 T + .25 O + .20 R + .15 E + .10 K, clipped to 0.1..1 (Pixelis, arXiv 2603.25091). T length, O operations, R share of
reasoning, E errors and corrections, K task.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pixelis.datasets.refinement.actions import THINK, actions, places_of
from pixelis.records import Demonstration, Level

WEIGHTS = {"length": 0.30, "operations": 0.25, "reasoning": 0.20, "errors": 0.15, "task": 0.10}
COSTS = {"track_object": 3, "segment_object_at": 3, "get_properties": 2, "zoom_in": 2, "read_text": 1, THINK: 0.5}
OTHER_COST = 2
"""Of operations that the source does not know, such as select_frames: they are looks, like zooms."""
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
"""Difficulty of a task by what its name contains, the first that fits."""
OTHER_TASK = 0.5

CORRECTION = re.compile(
    r"\b(wait|actually|mistake|mistaken|wrong|correct (this|that|it|myself)|let me (re|try again|correct)|re-?(check|crop|"
    r"select|examine|consider|do)\w*|look(ing)? again|try(ing)? again|that is not|that's not|not what|instead|missed|"
    r"should (not )?have)\b",
    re.IGNORECASE,
)
"""Words by which a thought takes something back."""

LEVELS: tuple[Level, ...] = ("simple", "medium", "hard")
CUTS = (33, 66)
IQR = 1.5


def score(demonstration: Demonstration) -> float:
    """Difficulty, 0.1..1."""
    parts = components(demonstration)
    return min(1.0, max(0.1, sum(weight * parts[name] for name, weight in WEIGHTS.items())))


def components(demonstration: Demonstration) -> dict[str, float]:
    """The five parts by name, before weighing; ``length`` counts thoughts and operations as one action each."""
    done = actions(demonstration)
    n = len(done)
    if n:
        operations = sum(COSTS.get(name, OTHER_COST) for name in done) / (3 * n) + 0.2 * len(set(done)) / n
    else:
        operations = 0.3
    return {
        "length": math.log(n + 1) / math.log(16) if n >= 2 else 0.1,
        "operations": operations,
        "reasoning": _reasoning(done.count(THINK) / n if n else 0.0),
        "errors": _errors(demonstration),
        "task": task_difficulty(demonstration.task),
    }


def task_difficulty(task: str) -> float:
    """K of a task by its name; 0.5 for one that the source does not know."""
    name = task.casefold()
    return next((value for value, parts in TASKS if any(part in name for part in parts)), OTHER_TASK)


def _reasoning(share: float) -> float:
    if share < 0.2:
        return share / 0.2
    return 1.0 if share <= 0.6 else 1 - 0.3 * (share - 0.6) / 0.4


def _errors(demonstration: Demonstration) -> float:
    """Corrections in words, the same operation three times in a row (each window counts), places looked at twice, the kind."""
    thoughts = " ".join(turn.think or "" for turn in demonstration.turns)
    names = [step.op for step in demonstration.steps]
    triples = sum(a == b == c for a, b, c in zip(names, names[1:], names[2:], strict=False))
    places = [place for step in demonstration.steps if (place := places_of(step)) is not None]
    revisited = len(set(places)) < len(places)
    return 0.3 * bool(CORRECTION.search(thoughts)) + 0.2 * triples + 0.2 * revisited + KINDS.get(demonstration.kind, 0.0)


def outliers(scores: Sequence[float]) -> list[bool]:
    """True for scores more than 1.5 interquartile ranges outside the quartiles."""
    if not scores:
        return []
    low, high = np.percentile(scores, (25, 75))
    reach = IQR * (high - low) + 1e-12
    return [bool(value < low - reach or value > high + reach) for value in scores]


def split(scores: Sequence[float], ids: Sequence[str]) -> list[Level]:
    """The level of each: below the 33rd percentile simple, above the 66th hard, else medium.

    Percentiles are taken by rank. Many demonstrations of one pattern have one score: those that straddle a cut are divided by a
    hash of their id, so that levels keep their shares and a set is split alike in whatever order it comes.
    """
    order = sorted(range(len(scores)), key=lambda i: (round(scores[i], 9), hashlib.sha256(ids[i].encode()).digest()))
    levels: list[Level] = ["medium"] * len(scores)
    for rank, i in enumerate(order):
        place = 100 * (rank + 0.5) / len(scores)
        levels[i] = "simple" if place <= CUTS[0] else "hard" if place > CUTS[1] else "medium"
    return levels


def grade(demonstrations: Sequence[Demonstration]) -> tuple[list[Demonstration], list[Demonstration]]:
    """(with difficulty and level, outliers in difficulty)."""
    scores = [round(score(d), 6) for d in demonstrations]
    out = outliers(scores)
    kept = [i for i, is_out in enumerate(out) if not is_out]
    levels = split([scores[i] for i in kept], [demonstrations[i].id for i in kept])
    graded = [
        demonstrations[i].model_copy(update={"difficulty": scores[i], "level": level})
        for i, level in zip(kept, levels, strict=True)
    ]
    return graded, [d for d, is_out in zip(demonstrations, out, strict=True) if is_out]


def statistics(demonstrations: Sequence[Demonstration]) -> dict[str, Any]:
    """By level: count, share, mean score, mean length, and the number of demonstrations by task."""
    out: dict[str, Any] = {}
    for level in LEVELS:
        of_level = [d for d in demonstrations if d.level == level]
        out[level] = {
            "count": len(of_level),
            "share": round(len(of_level) / len(demonstrations), 4) if demonstrations else 0.0,
            "difficulty": round(float(np.mean([d.difficulty or 0.0 for d in of_level])), 4) if of_level else None,
            "length": round(float(np.mean([len(actions(d)) for d in of_level])), 2) if of_level else None,
            "tasks": dict(Counter(d.task for d in of_level).most_common()),
        }
    return out
