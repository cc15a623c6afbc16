"""The answer of an episode as its reward reads it: by the dialect, in tags only, from untagged text, or by a user's function."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pixelis.config import RewardsConfig
from pixelis.dialogue.dialects.base import boxed
from pixelis.errors import DataFailure
from pixelis.records import StopReason, Trajectory
from pixelis.rewards.services import Services

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_STATED = re.compile(r"\banswer\b\s*(?:is|:|=)\s*(?::\s*)?(.+?)(?=\.(?:\s|$)|$|\n)", re.IGNORECASE)


def answers_of(trajectories: Sequence[Trajectory], settings: RewardsConfig, services: Services) -> dict[str, str | None]:
    """The answer by trajectory as ``rewards.extractor`` reads it.

    ``dialect``: as the dialect parsed it. ``tags``: answer tags alone. ``lenient``: else what a finished episode states without
    tags, as R1-V, Reason-RFT, TTRL and Pixel-Reasoner read it. A failing function of the user is counted and gives no answer.
    """
    kind = settings.extractor
    if kind == "dialect":
        return {t.id: t.answer for t in trajectories}
    if kind == "tags":
        return {t.id: _tagged(t) for t in trajectories}
    if kind == "lenient":
        return {t.id: t.answer if t.answer is not None else untagged(t) for t in trajectories}
    result: dict[str, str | None] = {}
    for trajectory in trajectories:
        try:
            result[trajectory.id] = services.extract(kind, _last_text(trajectory))
        except DataFailure as failure:
            services.note(f"extractor_{failure.code}")
            result[trajectory.id] = None
    return result


def untagged(trajectory: Trajectory) -> str | None:
    r"""The last ``\boxed{}`` after the thought, else what follows "answer is" or "Answer:", else the whole text.

    None for an episode that did not end by itself, or with a thought that is not closed.
    """
    if trajectory.stop_reason not in (StopReason.ANSWER, StopReason.NO_ACTION):
        return None
    text = _last_text(trajectory)
    if "<think>" in text and "</think>" not in text:
        return None
    body = text.rpartition("</think>")[2]
    if boxes := boxed(body):
        start, end = boxes[-1]
        return body[start:end].strip() or None
    if stated := _STATED.findall(body):
        return stated[-1].strip().strip("*").strip() or None
    return body.strip() or None


def _tagged(trajectory: Trajectory) -> str | None:
    answers = _TAGS.findall(_last_text(trajectory).rpartition("</think>")[2])
    return answers[-1].strip() if answers and trajectory.answer is not None else None


def _last_text(trajectory: Trajectory) -> str:
    return next((turn.text for turn in reversed(trajectory.turns) if turn.is_policy), "")
