"""The answer of an episode as its reward reads it (`rewards.extractor`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pixelis.config import RewardsConfig
from pixelis.dialogue.dialects.base import BOXED
from pixelis.errors import DataFailure
from pixelis.records import Group, StopReason, Trajectory
from pixelis.rewards.formats import completion
from pixelis.rewards.notation import canonical, clean, quantity, stated
from pixelis.rewards.scorers import case_of, letter
from pixelis.rewards.services import Services

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MAX_OTHER_WORDS = 3
"""Words that may stand beside the answer in an untagged last line."""
MAX_LINE_CHARS = 300


def answers_of(groups: Iterable[Group], settings: RewardsConfig, services: Services) -> dict[str, str | None]:
    """The answer by trajectory; a failing function of the user is counted and gives none.

    Without a tagged answer, ``lenient`` takes the untagged one (R1-V, Reason-RFT, TTRL, Pixel-Reasoner), and
    ``whole`` after that the whole text. ``reply`` is all that the policy wrote.
    """
    result: dict[str, str | None] = {}
    for group in groups:
        options = case_of(group.question, None, ()).options
        result |= {t.id: _answer(t, options, settings.extractor, services) for t in group.trajectories}
    return result


def _answer(trajectory: Trajectory, options: Sequence[str], extractor: str, services: Services) -> str | None:
    if extractor == "dialect":
        return trajectory.answer
    if extractor == "reply":
        return completion(trajectory)
    if extractor == "tags":
        answers = _TAGS.findall(_last_text(trajectory).rpartition("</think>")[2])
        return answers[-1].strip() if answers and trajectory.answer is not None else None
    if extractor in ("lenient", "whole"):
        answer = trajectory.answer if trajectory.answer is not None else untagged(trajectory, options)
        return _body(trajectory) if answer is None and extractor == "whole" else answer
    try:
        return services.extract(extractor, _last_text(trajectory))
    except DataFailure as failure:
        services.note(f"extractor_{failure.code}")
        return None


def untagged(trajectory: Trajectory, options: Sequence[str] = ()) -> str | None:
    """The answer that a finished episode states without tags, after its thought; None for other prose.

    In this order: the last box; what follows "answer is" or "Answer:"; a last line with one number, letter or
    option and at most ``MAX_OTHER_WORDS`` other words.
    """
    if (body := _body(trajectory)) is None:
        return None
    if BOXED.search(body):
        return clean(body) or None
    if (answer := stated(body)) is not None:
        return clean(answer) or None
    line = body.rstrip().rpartition("\n")[2]
    text = clean(line) if len(line) <= MAX_LINE_CHARS else ""
    if quantity(text) is not None:
        return text
    words = re.findall(r"[^\s,;:!?()\"]+", canonical(text))
    numbers = [word for word in words if quantity(word) is not None]
    if len(numbers) == 1 and len(words) <= MAX_OTHER_WORDS + 1:
        return numbers[0]
    for option in map(canonical, options):
        if option and re.search(rf"(?<!\w){re.escape(option)}(?!\w)", canonical(text)):
            named = [
                other
                for other in map(canonical, options)
                if other and other != option and other in canonical(text)
            ]
            return option if not named and len(words) <= len(option.split()) + MAX_OTHER_WORDS else None
    return letter(text, options) if 0 < len(words) <= MAX_OTHER_WORDS + 1 and not numbers else None


def _body(trajectory: Trajectory) -> str | None:
    """The last text after the thought; None if either was cut off."""
    text = _last_text(trajectory)
    if trajectory.stop_reason not in (StopReason.ANSWER, StopReason.NO_ACTION) or (
        "<think>" in text and "</think>" not in text
    ):
        return None
    return text.rpartition("</think>")[2].strip() or None


def _last_text(trajectory: Trajectory) -> str:
    return trajectory.replies[-1].text if trajectory.replies else ""
