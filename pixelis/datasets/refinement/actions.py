"""A demonstration as a sequence of actions: the basis of lengths, scores, duplicates and cycles."""

from __future__ import annotations

import json
from typing import Any

from pixelis.records import Demonstration, SampleKind, Step

THINK = "think"
TRAPS: tuple[SampleKind, ...] = ("trap_perceptual", "trap_logical")
WRONG: tuple[SampleKind, ...] = ("outcome_negative", *TRAPS)
"""Kinds that are wrong on purpose."""
CRITICAL: tuple[SampleKind, ...] = (*TRAPS, "self_correction")

CATEGORIES = {
    "geometric": ("geometric", "compar"),
    "ocr": ("text", "ocr", "read"),
    "spatio_temporal": ("track", "temporal"),
    "select": ("select", "frame", "moment"),
    "zoom": ("zoom", "detail", "perception", "search"),
}
"""Groups of tasks that recipes share out, and what the name of such a task contains; the first that fits. Others are ``vqa``."""
VQA = "vqa"


def actions(demonstration: Demonstration) -> list[str]:
    """Names of its actions in order: a thought is one (``think``), an operation is one; the answer is none."""
    out: list[str] = []
    for turn in demonstration.turns:
        if turn.think and turn.think.strip():
            out.append(THINK)
        if turn.op is not None:
            out.append(turn.op)
    return out


def category(task: str) -> str:
    """The group of tasks that recipes count a task to."""
    name = task.casefold()
    if name in CATEGORIES:
        return name
    return next((group for group, parts in CATEGORIES.items() if any(part in name for part in parts)), VQA)


def group_of(kind: SampleKind) -> str:
    """golden, trap or self_correction: what recipes mix; an outcome negative counts as a trap."""
    return "trap" if kind in WRONG else kind


def signature(step: Step, places: int = 4) -> str:
    """What a call does as text that is equal for equal calls: operation, target and arguments, numbers rounded."""
    return json.dumps([step.op, step.target, rounded(step.arguments, places)], sort_keys=True, ensure_ascii=True, default=str)


def rounded(value: Any, places: int) -> Any:
    """Plain values with every number rounded; 1 and 1.0 become the same."""
    if isinstance(value, bool) or not isinstance(value, (int, float, list, tuple, dict)):
        return value
    if isinstance(value, (int, float)):
        return round(float(value), places)
    if isinstance(value, dict):
        return {str(key): rounded(inner, places) for key, inner in value.items()}
    return [rounded(inner, places) for inner in value]


def places_of(step: Step) -> str | None:
    """Where a call looks, as text; None for a call without coordinates."""
    found = {key: step.arguments[key] for key in ("box", "point", "center") if step.arguments.get(key) is not None}
    return json.dumps([step.target, rounded(found, 3)], sort_keys=True, default=str) if found else None
