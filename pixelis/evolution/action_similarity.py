"""Similarity of the sequences of operations of two episodes, for votes of whole trajectories (Pixelis, arXiv 2603.25091)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pixelis.records import Action, Trajectory
from pixelis.rewards.scorers import box_iou


def actions(trajectory: Trajectory) -> list[Action]:
    """The operations that the policy called, in order."""
    return [action for turn in trajectory.turns if turn.is_policy for action in turn.actions]


def action_similarity(a: Sequence[Action], b: Sequence[Action]) -> float:
    """Value of the best alignment of two sequences / the longer length, 0..1; 1 if both are empty.

    An aligned pair of the same operation is worth one half, and another half for equal arguments; of boxes, their IoU.
    """
    if not a or not b:
        return float(not a and not b)
    best = [0.0] * (len(b) + 1)
    for left in a:
        row = [0.0]
        for j, right in enumerate(b):
            row.append(max(best[j + 1], row[j], best[j] + _pair(left, right)))
        best = row
    return best[-1] / max(len(a), len(b))


def _pair(a: Action, b: Action) -> float:
    if a.op != b.op:
        return 0.0
    if a.target != b.target:
        return 0.5
    keys = sorted(a.arguments.keys() | b.arguments.keys())
    values = [_argument(a.arguments.get(key), b.arguments.get(key)) for key in keys]
    return 0.5 + 0.5 * (sum(values) / len(values) if values else 1.0)


def _argument(a: Any, b: Any) -> float:
    if _is_box(a) and _is_box(b):
        return box_iou(a, b)
    return float(a == b)


def _is_box(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != 4 or not all(isinstance(v, (int, float)) for v in value):
        return False
    return bool(value[0] < value[2] and value[1] < value[3])
