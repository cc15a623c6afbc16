"""Demonstrations as sequences of actions; groups of tasks and kinds."""

from __future__ import annotations

import json
from typing import Any

from pixelis.operations.scale import PLACES
from pixelis.records import Demonstration, SampleKind, Step

THINK = "think"
TRAPS: tuple[SampleKind, ...] = ("trap_perceptual", "trap_logical")
WRONG_KINDS: tuple[SampleKind, ...] = ("outcome_negative", *TRAPS)
CRITICAL_KINDS: tuple[SampleKind, ...] = (*TRAPS, "self_correction")

CATEGORIES = {
    "geometric": ("geometric", "compar"),
    "ocr": ("text", "ocr", "read"),
    "spatio_temporal": ("track", "temporal"),
    "select": ("select", "frame", "moment"),
    "zoom": ("zoom", "detail", "perception", "search"),
}
"""Groups of tasks in recipes, with parts of their tasks' names; the first match counts.

Other tasks are ``vqa``.
"""
VQA = "vqa"


def actions(demonstration: Demonstration) -> list[str]:
    """The names of its actions in order: thoughts (``think``) and operations, without the answer."""
    names: list[str] = []
    for turn in demonstration.turns:
        if turn.think and turn.think.strip():
            names.append(THINK)
        if turn.op is not None:
            names.append(turn.op)
    return names


def category(task: str) -> str:
    name = task.casefold()
    if name in CATEGORIES:
        return name
    return next((group for group, parts in CATEGORIES.items() if any(part in name for part in parts)), VQA)


def kind_group(kind: SampleKind) -> str:
    """The group of a kind in recipes: golden, trap (with outcome negatives) or self_correction."""
    return "trap" if kind in WRONG_KINDS else kind


def signature(step: Step, places: int = 4) -> str:
    return json.dumps(
        [step.op, step.target, rounded(step.arguments, places)],
        sort_keys=True,
        ensure_ascii=True,
        default=str,
    )


def rounded(value: Any, places: int) -> Any:
    """Plain values with every number rounded, so that 1 and 1.0 are equal."""
    if isinstance(value, bool) or not isinstance(value, (int, float, list, tuple, dict)):
        return value
    if isinstance(value, (int, float)):
        return round(float(value), places)
    if isinstance(value, dict):
        return {str(key): rounded(inner, places) for key, inner in value.items()}
    return [rounded(inner, places) for inner in value]


def location(step: Step) -> str | None:
    coordinates = {key: step.arguments[key] for key in PLACES if step.arguments.get(key) is not None}
    return (
        json.dumps([step.target, rounded(coordinates, 3)], sort_keys=True, default=str)
        if coordinates
        else None
    )
