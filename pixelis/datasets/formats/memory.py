"""Experiences of an exported memory: questions without labels about pictures as the policy saw them."""

from __future__ import annotations

from pixelis.datasets import fields
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import Format, Row
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Experience, Media, Question


def _read(row: Row, name: str, root: MediaRoot) -> Question:
    """The question under its experience's id, since a question may have been asked again."""
    experience = Experience.model_validate_json(fields.text(row, "experience"))
    pictures = dict(fields.optional(row, "pictures", list, []))
    media = []
    for item in experience.question.media:
        if item.id not in pictures:
            raise RowError("pictures", "not_stored", f"the memory has no picture of {item.id}")
        media.append(Media(id=item.id, uri=root.reference("pictures", pictures[item.id])))
    question = experience.question.model_copy(update={"media": media})
    return Question.of(question, id=experience.id, answers=None)


MEMORY = Format(_read)
