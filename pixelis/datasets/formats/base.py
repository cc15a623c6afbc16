"""Row formats as maps from columns to the fields of a question, and the helpers that formats share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pixelis.datasets import fields
from pixelis.datasets.fields import RowError
from pixelis.datasets.media_root import MediaRoot
from pixelis.errors import BadInput
from pixelis.records import Demonstration, Media, Question
from pixelis.rewards.scorers import option_lines

Row = dict[str, Any]
_LEADING = re.compile(r"(\s*<(image|video)>)+\s*")
_LETTER = re.compile(r"\(?([A-H])\)?\.?")
_TRANCE = re.compile(r"(?<![a-z])trance", re.IGNORECASE)
"""In the ids of Reason-RFT's questions about transformations, whose answers are sequences of functions."""


@dataclass(frozen=True)
class Format:
    """A row format: the columns that identify it, and how its rows are read and written.

    A row is of this format if it has all ``required`` columns, one of ``any_of`` if there are some, none of ``excluded`` and no
    other than ``allowed``; each is one text of names separated by spaces. ``read(row, name, root)`` returns the record, ``name``
    being the id of a row without one. ``write`` is None for formats that are only read; ``write_chat(record, replies, images)``
    takes the replies of the assistant rendered in ``dialect`` and the files of the images that each operation returned.
    """

    required: str
    read: Callable[[Row, str, MediaRoot], Question]
    write: Callable[[Question], Row] | None = None
    write_chat: Callable[[Demonstration, list[str], list[list[str]]], Row] | None = None
    dialect: str = ""
    any_of: str = ""
    excluded: str = ""
    allowed: str = ""

    def matches(self, columns: set[str]) -> bool:
        """Whether a row with these columns may be of this format."""
        return (
            columns.issuperset(self.required.split())
            and columns.isdisjoint(self.excluded.split())
            and (not self.any_of or not columns.isdisjoint(self.any_of.split()))
            and (not self.allowed or columns.issubset(self.allowed.split()))
        )


@dataclass(frozen=True)
class Columns:
    """Which column holds which field of a question.

    Rows without an ``id`` or ``task`` column in their format may still have ``id`` and ``data_source``. ``scorer`` scores the
    answers that are not a letter of a choice. ``placeholder`` is written before the question, once for each of its media.
    ``unlabelled``: rows may lack the answer, and the scorer follows from the question alone: a letter if it lists options.
    """

    question: str
    answers: str
    images: str = ""
    videos: str = ""
    id: str = ""
    task: str = ""
    scorer: str = "math"
    split: str = "train"
    placeholder: str = ""
    unlabelled: bool = False

    def read(self, row: Row, name: str, root: MediaRoot) -> Question:
        """The question of a row; RowError names the column that cannot be used."""
        media, task = root.media(row, self.images, self.videos), self.task or "data_source"
        own_id = fields.identifier(row, *filter(None, (self.id, "id"))) or name
        text = fields.text(row, self.question)
        unlabelled = self.unlabelled and row.get(self.answers) in (None, "", [])
        answers = None if unlabelled else fields.answers(row, self.answers)
        by_text = "mc_letter" if option_lines(text) else self.scorer
        return Question(
            id=own_id,
            question=question_text(text, self.question, media) if self.images or self.videos else text,
            media=media,
            answers=answers,
            scorer="func_seq"
            if _TRANCE.search(own_id)
            else by_text
            if self.unlabelled
            else scorer_of(answers or [], self.scorer),
            task=fields.identifier(row, task) or "qa",
            split=self.split,
            meta=other_columns(row, "id", self.id, self.question, self.answers, self.images, self.videos, task),
        )

    def write(self, record: Question) -> Row:
        """The row of a question; BadInput if the format cannot hold its media."""
        answers = record.answers or []
        row: Row = {self.id: record.id} if self.id else {}
        row[self.question] = marked(record, self.placeholder)
        if answers:
            row[self.answers] = answers[0] if len(answers) == 1 else list(answers)
        if self.task:
            row[self.task] = record.task
        if self.videos and (clips := [whole_clip(record, item) for item in record.media if item.kind == "video"]):
            row[self.videos] = clips
        if paths := image_paths(record, None if self.images else 0, clips=bool(self.videos)):
            row[self.images] = paths
        return row


def question_text(text: str, column: str, media: Sequence[Media]) -> str:
    """The text without leading ``<image>`` and ``<video>``; RowError ``media_count`` if their numbers differ from the media's.

    Marks inside the text stay: they say where the images are shown.
    """
    for kind in ("image", "video"):
        marks, count = text.count(f"<{kind}>"), sum(item.kind == kind for item in media)
        if marks and marks != count:
            raise RowError(column, "media_count", f"the text has {marks} <{kind}> and the row {count} of them")
    rest = text[leading.end() :] if (leading := _LEADING.match(text)) else text
    text = (text if "<image>" in rest or "<video>" in rest else rest).strip()
    if not text:
        raise RowError(column, "empty", "the text is empty")
    return text


def marked(record: Question, placeholder: str) -> str:
    """The text of a question with a mark for each of its media, unless it has marks already."""
    if "<image>" in record.question or "<video>" in record.question:
        return record.question
    return "".join(placeholder.format(item.kind) for item in record.media) + record.question


def scorer_of(answers: Sequence[str], otherwise: str) -> str:
    """``mc_letter`` if every answer is the letter of a choice, or else ``otherwise``."""
    return "mc_letter" if all(_LETTER.fullmatch(answer) for answer in answers) else otherwise


def other_columns(row: Row, *used: str) -> dict[str, Any]:
    """The columns that are not ``used`` and can be written as JSON: they become ``meta``, which custom rewards receive."""
    return {key: value for key, value in row.items() if key not in used and value is not None and _is_json(value)}


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def image_paths(record: Question, limit: int | None = None, clips: bool = False) -> list[str]:
    """The image files of a question; BadInput if there are more than ``limit``, or media other than images and ``clips``."""
    paths = [item.uri for item in record.media if item.kind == "image" and item.uri]
    unsupported = not clips and len(paths) != len(record.media)
    if unsupported or (limit is not None and len(paths) > limit):
        count = "any number of" if limit is None else f"at most {limit}" if limit else "no"
        raise BadInput(f"{record.id}: rows of this format hold {count} images and no clips")
    return paths


def whole_clip(record: Question, clip: Media) -> list[str] | str:
    """The frames or the file of a clip; BadInput for a part of one, for which rows of other systems have no column."""
    if clip.spans:
        raise BadInput(f"{record.id}: rows of this format hold whole clips, not spans of one", fix="cut the clip into a file")
    return clip.frames or clip.uri


def single_image(record: Question) -> str:
    """The file of the one image of a question; BadInput otherwise."""
    paths = image_paths(record, 1)
    if not paths:
        raise BadInput(f"{record.id}: rows of this format need an image", code="no_media")
    return paths[0]


def image_bytes(path: str) -> Row:
    """An image as parquet files hold it."""
    return {"bytes": Path(path).read_bytes(), "path": None}
