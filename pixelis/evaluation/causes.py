"""Why episodes are wrong: the first step on the way to the answer that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, get_args

from pixelis.evaluation.capabilities import SCORES, Call, ExpectedCall, executed_calls, expected_calls
from pixelis.records import Group, StopReason, Trajectory

Cause = Literal["no answer", "never looked", "looked elsewhere", "misread", "reasoned wrongly"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
MIN_SCORE = 0.5
"""Score from which on calls show what they should."""
SHOWS_ONLY = ("zoom_in", "select_frames")
"""Operations that show something and say nothing about it: the policy itself must read it."""


def cause_of(group: Group, trajectory: Trajectory) -> Cause | None:
    """The cause of a wrong answer, the first of `CAUSES`; None if right, unscored or without expected calls.

    - ``never looked``: no call succeeded.
    - ``looked elsewhere``: the calls miss what the question is about, or a needed call was not made.
    - ``misread``: they show it, but `read_text` gave another text, or the policy read a view wrongly.
    - ``reasoned wrongly``: the operations returned what the answer needs.
    """
    expected = expected_calls(group)
    if not expected or trajectory.rewards.get("accuracy", 1.0) > 0.5:
        return None
    if trajectory.answer is None and trajectory.stop_reason != StopReason.ANSWER:
        return "no answer"
    calls = [call for call in executed_calls(trajectory) if call.observation.status == "ok"]
    if not calls:
        return "never looked"
    called = {call.action.op for call in calls}
    shown = (
        _score(calls, truth) >= MIN_SCORE if truth.op in SCORES else truth.op in called for truth in expected
    )
    if not all(shown):
        return "looked elsewhere"
    last = expected[-1]
    if last.op in SHOWS_ONLY or (last.op == "read_text" and _score(calls, last) < 1):
        return "misread"
    return "reasoned wrongly"


def _score(calls: Sequence[Call], truth: ExpectedCall) -> float:
    return SCORES[truth.op][1]([call for call in calls if call.action.op == truth.op], truth)


def error_causes(groups: Sequence[Group]) -> dict[str, Any]:
    """Number of wrong episodes by cause, in the order of `CAUSES`; empty if none is known."""
    counts = Counter(
        cause for group in groups for t in group.trajectories if (cause := cause_of(group, t)) is not None
    )
    return {cause: counts[cause] for cause in CAUSES} if counts else {}
