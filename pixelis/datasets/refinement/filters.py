"""Filters questions by pass rate, perception utility (DeepEyes), and occurrence in evaluation sets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pixelis.config.refinement import PassRateConfig
from pixelis.datasets.refinement.duplicates import question_hash
from pixelis.errors import DataFailure
from pixelis.records import Question

MAX_IDS = 20
MIN_UTILITY, MAX_RATE_WITHOUT = 0.25, 0.5
"""Minimum gain in pass rate from operations, and maximum pass rate without them, where looking pays."""


@dataclass
class Outcomes:
    """Scores of the episodes of one question, with operations (``looking``) and without (``glance``)."""

    looking: list[float] = field(default_factory=list)
    glance: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float | None:
        return sum(self.looking) / len(self.looking) if self.looking else None

    @property
    def utility(self) -> float | None:
        return (
            self.rate - sum(self.glance) / len(self.glance) if self.rate is not None and self.glance else None
        )


Row = tuple[str, bool, float | None]
"""Question id, whether the episode had operations, and its score (None: unscored)."""


def group_outcomes(rows: Iterable[Row]) -> dict[str, Outcomes]:
    outcomes: dict[str, Outcomes] = defaultdict(Outcomes)
    for question, operations, score in rows:
        scores = outcomes[question].looking if operations else outcomes[question].glance
        if score is not None:
            scores.append(score)
    return dict(outcomes)


def drop_cause(outcomes: Outcomes | None, settings: PassRateConfig) -> str | None:
    if outcomes is None or outcomes.rate is None:
        return "no_pass_rate"
    if outcomes.rate < settings.low:
        return "too_hard"
    if outcomes.rate > settings.high:
        return "too_easy"
    if settings.utility:
        if outcomes.utility is None:
            return "no_pass_rate"
        if outcomes.utility < MIN_UTILITY or outcomes.rate - outcomes.utility > MAX_RATE_WITHOUT:
            return "looking_does_not_pay"
    return None


def leaks(
    questions: Sequence[Question],
    media: Mapping[str, Sequence[str]],
    held_out: Sequence[Question],
    held_out_media: Mapping[str, Sequence[str]],
    match: str = "question",
) -> dict[str, str]:
    """The ids of questions that occur in an evaluation set, mapped to their ids there.

    ``media``: content hashes by id. ``match``: ``question`` compares text and all pictures, ``picture`` any.
    """

    def keys(question: Question, pictures: Sequence[str]) -> Sequence[str]:
        return pictures if match == "picture" else [question_hash(question, pictures)]

    held_out_ids: dict[str, str] = {}
    for question in held_out:
        for key in keys(question, held_out_media[question.id]):
            held_out_ids.setdefault(key, question.id)
    hits = {}
    for question in questions:
        if found := [held_out_ids[key] for key in keys(question, media[question.id]) if key in held_out_ids]:
            hits[question.id] = found[0]
    return hits


def refuse(hits: Mapping[str, str]) -> None:
    """DataFailure ``held_out`` with the ids if there are any."""
    if hits:
        ids = ", ".join(f"{own} = {held_out}" for own, held_out in list(hits.items())[:MAX_IDS])
        remainder = f" and {len(hits) - MAX_IDS} more" if len(hits) > MAX_IDS else ""
        raise DataFailure(
            f"{len(hits)} of the questions are evaluation questions: {ids}{remainder}",
            code="held_out",
            fix="remove them from the source, or set refinement.holdout.drop=true",
        )
