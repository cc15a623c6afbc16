"""What a row format implements, and the helpers that formats share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pixelis.datasets.fields import RowError
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Media, Question, place_media

Row = dict[str, Any]
Read = Callable[[Row, str, MediaRoot], Question | list[Question]]
_LEADING = re.compile(r"(\s*<(image|video)>)+\s*")
_LETTER = re.compile(r"\(?([A-Z])\)?\.?")
QUESTIONS = ("question", "problem", "query", "prompt", "instruction")
IMAGES = (
    "image",
    "images",
    "image_path",
    "image_paths",
    "image_file",
    "img",
    "picture",
    "file_name",
    "filename",
    "image_url",
)
ANSWERS = (
    "answer",
    "answers",
    "solution",
    "response",
    "ground_truth",
    "label",
    "output",
    "target",
    "completion",
)
VIDEOS = ("video", "videos", "video_path", "clip")
"""Usual names of columns; the first that a row has is read."""


@dataclass(frozen=True)
class Format:
    """How rows of a format are read: ``read(row, name, root)``, ``name`` for a row without an id.

    ``demonstrate`` reads a question with its answer as a demonstration.
    """

    read: Read
    demonstrate: Read | None = None


def first_column(row: Row, names: Sequence[str]) -> str:
    """The first of these columns that has a value in a row; empty without one."""
    return next((name for name in names if row.get(name) not in (None, "", [])), "")


def find_columns(row: Row, named: Mapping[str, str]) -> tuple[str, str, str, str]:
    """The question, answer, image and video columns of a table: those ``named``, or those with a usual name.

    RowError ``missing_column`` or ``ambiguous_columns``.
    """
    existing = {name.strip().lower(): name for name in reversed(row)}

    def find(role: str, names: tuple[str, ...]) -> str:
        matching = [existing[name] for name in names if name in existing]
        if role in named:
            matching = [named[role]] if named[role] in row else []
        elif role == "image":
            return first_column(row, matching)
        if not matching:
            message = f"is missing; the columns are {', '.join(row)}"
            raise RowError(named.get(role, role), "missing_column", message)
        if len(matching) > 1 and matching[0] != existing.get(role):
            message = f"may be {' or '.join(matching)}: name it with ?{role}=COLUMN"
            raise RowError(role, "ambiguous_columns", message)
        return matching[0]

    columns = find("question", QUESTIONS), find("answer", ANSWERS), find("image", IMAGES)
    return *columns, first_column(row, VIDEOS)


def check_marks(text: str, column: str, kinds: Sequence[str], checked: Iterable[str]) -> None:
    """RowError ``media_count`` if the marks of a ``checked`` kind are not as many as its media."""
    for kind in checked:
        marks, count = text.count(f"<{kind}>"), kinds.count(kind)
        if marks and marks != count:
            raise RowError(column, "media_count", f"the text has {marks} <{kind}>, the row {count} of them")


def question_text(text: str, column: str, media: Sequence[Media]) -> str:
    """The text without leading ``<image>`` and ``<video>``; RowError ``media_count`` or ``empty``.

    Marks inside the text, or in another order than the media, say where the media are shown.
    """
    kinds = [item.kind for item in media]
    check_marks(text, column, kinds, ("image", "video"))
    rest = text[leading.end() :] if (leading := _LEADING.match(text)) else text
    shown = [piece for piece in place_media(text, kinds) if isinstance(piece, int)]
    text = (text if "<image>" in rest or "<video>" in rest or shown != sorted(shown) else rest).strip()
    if not text:
        raise RowError(column, "empty", "the text is empty")
    return text


def choices(question: str, options: list[str]) -> str:
    return "\n".join([question, *(f"{chr(ord('A') + i)}. {option}" for i, option in enumerate(options))])


def scorer_of(answers: Sequence[str], otherwise: str) -> str:
    """``mc_letter`` if every answer is the letter of a choice, or else ``otherwise``."""
    return "mc_letter" if all(_LETTER.fullmatch(answer) for answer in answers) else otherwise


def other_columns(row: Row, *used: str) -> dict[str, Any]:
    """The columns that are not ``used`` and can be written as JSON, for ``meta``."""
    others = {key: value for key, value in row.items() if key not in used and value is not None}
    return {key: value for key, value in others.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
