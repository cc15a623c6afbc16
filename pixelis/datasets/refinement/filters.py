"""Which questions are worth asking: of the right difficulty for the policy, where looking pays, and in no evaluation set.

Pure logic on tables; ``jobs.refine`` runs the episodes. By pass rate as Mini-o3 and Pixel-Reasoner drop what is always or never
right; perception utility as DeepEyes keeps what is missed at a glance and right when looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pixelis.config.refinement import PassRateConfig
from pixelis.datasets.refinement.duplicates import question_hash
from pixelis.errors import DataFailure
from pixelis.records import Question

SHOWN = 20


@dataclass
class Outcomes:
    """Scores of the episodes of one question, with operations and without; unscored ones are not among them."""

    looking: list[float] = field(default_factory=list)
    glance: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float | None:
        """Pass rate with operations; None when no episode was scored."""
        return sum(self.looking) / len(self.looking) if self.looking else None

    @property
    def utility(self) -> float | None:
        """Pass rate with operations minus that without; None when one of them is unknown."""
        return self.rate - sum(self.glance) / len(self.glance) if self.rate is not None and self.glance else None


Row = tuple[str, bool, float | None]
"""Question id, whether operations were on offer, score of the episode (None: unscored)."""


def table(rows: Iterable[Row]) -> dict[str, Outcomes]:
    """Outcomes by question id."""
    out: dict[str, Outcomes] = defaultdict(Outcomes)
    for question, operations, value in rows:
        known = out[question]
        if value is not None:
            (known.looking if operations else known.glance).append(value)
    return dict(out)


def decide(outcomes: Outcomes | None, settings: PassRateConfig) -> str | None:
    """Why a question is dropped: ``no_pass_rate``, ``too_hard``, ``too_easy``, ``looking_does_not_pay``; None to keep it.

    Both bounds of the pass rate are inclusive.
    """
    if outcomes is None or outcomes.rate is None:
        return "no_pass_rate"
    if outcomes.rate < settings.low:
        return "too_hard"
    if outcomes.rate > settings.high:
        return "too_easy"
    if settings.utility:
        if outcomes.utility is None:
            return "no_pass_rate"
        glance = sum(outcomes.glance) / len(outcomes.glance)
        if outcomes.utility < settings.margin or glance > settings.without:
            return "looking_does_not_pay"
    return None


def leaks(
    questions: Sequence[Question],
    pictures: Mapping[str, Sequence[str]],
    held_out: Sequence[Question],
    held_out_pictures: Mapping[str, Sequence[str]],
    match: str = "question",
) -> dict[str, str]:
    """Id of each question that an evaluation set holds -> the id there.

    ``pictures``: content hashes of the media by question id. ``match``: ``question`` text and all pictures, or ``picture`` any
    one picture.
    """
    seen: dict[str, str] = {}
    for question in held_out:
        for key in _keys(question, held_out_pictures[question.id], match):
            seen.setdefault(key, question.id)
    out = {}
    for question in questions:
        hit = next((seen[key] for key in _keys(question, pictures[question.id], match) if key in seen), None)
        if hit is not None:
            out[question.id] = hit
    return out


def refuse(hits: Mapping[str, str]) -> None:
    """DataFailure ``held_out`` naming the ids, when there is any."""
    if hits:
        named = ", ".join(f"{ours} = {theirs}" for ours, theirs in list(hits.items())[:SHOWN])
        more = f" and {len(hits) - SHOWN} more" if len(hits) > SHOWN else ""
        raise DataFailure(
            f"{len(hits)} of the questions are evaluation questions: {named}{more}",
            code="held_out",
            fix="take them out of the source, or set refinement.holdout.drop=true",
        )


def _keys(question: Question, pictures: Sequence[str], match: str) -> list[str]:
    return list(pictures) if match == "picture" else [question_hash(question, pictures)]
