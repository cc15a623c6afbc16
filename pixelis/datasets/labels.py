"""Cuts true answers off at the reader, so that no scorer, vote, filter or reward can depend on one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from pixelis.records import Question
from pixelis.rewards.scorers import case_of

MASK = "-"
"""Stands for every truth while a row is read; it is no letter of a choice and no number."""
MASKED = (
    "answer",
    "solution",
    "ground_truth",
    "cot",
    "thinking",
    "response",
    "label",
    "output",
    "target",
    "completion",
)
REMOVED = ("answers", "annotations")
META = ("options", "system", "weight", "feedback")
"""Keys of ``meta`` that belong to the question, or are a user's words; all others may repeat the truth."""
_CHOICES = frozenset({"math", "exact", "pixel_reasoner"})
"""Scorers of answers that are no letters: without the answer, a question with options is a choice."""


class Labels(NamedTuple):
    """What was cut off, for metrics only."""

    answers: list[str]
    scorer: str


OnLabels = Callable[[str, Labels], None]
"""Receives the id of a question and its labels."""


def mask_truths(row: dict[str, Any], columns: Collection[str] = MASKED) -> dict[str, Any]:
    kept = {key: value for key, value in row.items() if key not in REMOVED}
    masked: dict[str, Any] = {key: MASK if key in columns else value for key, value in kept.items()}
    if isinstance(model := row.get("reward_model"), dict):
        style = {"style": model["style"]} if "style" in model else {}
        masked["reward_model"] = {"ground_truth": MASK, **style}
    return masked


def without_truths(question: Question) -> Question:
    """The question alone, with a scorer that follows from its options."""
    meta = {key: question.meta[key] for key in META if key in question.meta}
    stripped = Question.of(question, meta=meta, **dict.fromkeys(REMOVED))
    if stripped.scorer in _CHOICES and len(case_of(stripped, None, ()).options) > 1:
        stripped.scorer = "mc_letter"
    return stripped


def read_without_truths(question: Question) -> Question:
    # Some readers choose by the truth between count and exact, or between mc_letter and math
    scorer = {"count": "exact", "mc_letter": "math"}.get(question.scorer, question.scorer)
    return without_truths(question.model_copy(update={"scorer": scorer}))


def labels_of(question: Question) -> Labels | None:
    return Labels(list(question.answers), question.scorer) if question.answers else None


def drop_labels(id: str, labels: Labels) -> None:
    """An OnLabels that keeps nothing: for readers of questions alone."""
