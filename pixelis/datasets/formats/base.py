"""Row formats, and the helpers that they share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pixelis.datasets.fields import RowError
from pixelis.datasets.media_root import MediaRoot
from pixelis.errors import BadInput
from pixelis.records import Demonstration, Media, Question, place_media

Row = dict[str, Any]
_LEADING = re.compile(r"(\s*<(image|video)>)+\s*")
_LETTER = re.compile(r"\(?([A-Z])\)?\.?")
IMAGES = ("image", "images", "image_path", "image_paths", "image_file", "img", "picture", "file_name", "filename", "image_url")
ANSWERS = ("answer", "answers", "solution", "response", "ground_truth", "label", "output", "target", "completion")
VIDEOS = ("video", "videos", "video_path", "clip")
"""Columns that rows call their media by; the first that a row has is read."""


@dataclass(frozen=True)
class Format:
    """A row format: the columns that identify it, and how its rows are read and written.

    A row is detected to be of this format if it has all ``required`` columns, of which there must be some, one of ``any_of`` if
    there are some, none of ``excluded`` and no other than ``allowed``; each is one text of names separated by spaces.

    ``read(row, name, root)`` returns the record, or the records of a chat with several questions; ``name`` is the id of a row
    without one. ``demonstrate`` reads a question with its answer as a demonstration that answers at once. ``write`` is None for
    formats that are only read; ``write_chat(record, replies, images)`` takes the replies of the assistant rendered in ``dialect``
    and the files of the images that each operation returned.
    """

    required: str
    read: Callable[[Row, str, MediaRoot], Question | list[Question]]
    write: Callable[[Question], Row] | None = None
    write_chat: Callable[[Demonstration, list[str], list[list[str]]], Row] | None = None
    demonstrate: Callable[[Row, str, MediaRoot], Question | list[Question]] | None = None
    dialect: str = ""
    any_of: str = ""
    excluded: str = ""
    allowed: str = ""

    def matches(self, columns: set[str]) -> bool:
        """Whether a row with these columns may be of this format."""
        return (
            bool(self.required)
            and columns.issuperset(self.required.split())
            and columns.isdisjoint(self.excluded.split())
            and (not self.any_of or not columns.isdisjoint(self.any_of.split()))
            and (not self.allowed or columns.issubset(self.allowed.split()))
        )


def first_column(row: Row, names: Sequence[str]) -> str:
    """The first of these columns that a row has a value in; empty without one."""
    return next((name for name in names if row.get(name) not in (None, "", [])), "")


def check_marks(text: str, column: str, kinds: Sequence[str], checked: Iterable[str]) -> None:
    """RowError ``media_count`` if a text has marks of a ``checked`` kind, but not one for each of the media of ``kinds``."""
    for kind in checked:
        marks, count = text.count(f"<{kind}>"), kinds.count(kind)
        if marks and marks != count:
            raise RowError(column, "media_count", f"the text has {marks} <{kind}> and the row {count} of them")


def question_text(text: str, column: str, media: Sequence[Media]) -> str:
    """The text without leading ``<image>`` and ``<video>``; RowError ``media_count`` if their numbers differ from the media's.

    Marks inside the text, or in another order than the media, stay: they say where the media are shown.
    """
    check_marks(text, column, [item.kind for item in media], ("image", "video"))
    rest = text[leading.end() :] if (leading := _LEADING.match(text)) else text
    shown = [piece for piece in place_media(text, [item.kind for item in media]) if isinstance(piece, int)]
    text = (text if "<image>" in rest or "<video>" in rest or shown != sorted(shown) else rest).strip()
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
