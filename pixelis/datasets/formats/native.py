"""Pixelis's own rows: the fields of ``pixelis.records``."""

from __future__ import annotations

import functools

from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import Format, Row, check_marks
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Demonstration, Question


def _read(kind: type[Question], row: Row, name: str, root: MediaRoot) -> Question:
    record = kind.model_validate(row)
    for i, media in enumerate(record.media):
        if media.frames:
            media.frames = [root.reference(f"media.{i}.frames", frame) for frame in media.frames]
        else:
            media.uri = root.reference(f"media.{i}.uri", media.uri)
    texts = [(f"history.{i}.question", e.question, set(e.media)) for i, e in enumerate(record.history)]
    own = {item.id for item in record.media}.difference(*(ids for _, _, ids in texts))
    for column, text, ids in [*texts, ("question", record.question, own)]:
        kinds = [item.kind for item in record.media if item.id in ids]
        check_marks(text, column, kinds, kinds)  # without media, marks are text about them
    for column in ("regions", "lines"):
        for i, item in enumerate(getattr(record.annotations, column, ())):
            if item.box is not None and not all(0 <= edge <= 1 for edge in item.box):
                message = "the box is outside 0..1: boxes are fractions of the image, not pixels"
                raise RowError(f"annotations.{column}.{i}.box", "out_of_range", message)
    return record


QUESTION, DEMONSTRATION = (Format(functools.partial(_read, kind)) for kind in (Question, Demonstration))
