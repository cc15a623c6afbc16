"""Writes questions and demonstrations as rows of a format."""

from __future__ import annotations

from collections.abc import Sequence

from pixelis.datasets.formats import FORMATS, chat, load_format
from pixelis.datasets.formats.base import Row
from pixelis.errors import BadInput
from pixelis.records import Demonstration, Question

UNLABELLED = ("ttrl", "ttrl_parquet")
"""Formats whose rows may lack an answer."""


def write_question(record: Question, format: str) -> Row:
    """The row of a question in ``format``; BadInput if the format cannot hold it."""
    write = load_format(format).write if format in FORMATS else None
    if write is None:
        names = ", ".join(name for name in FORMATS if load_format(name).write)
        raise BadInput(
            f"questions cannot be written as `{format}`", code="unknown_format", fix=f"use one of {names}"
        )
    if record.history and format != "question":
        raise BadInput(
            f"{record.id}: rows of {format} hold no earlier questions", fix="write it as `question`"
        )
    if not record.answers and format not in UNLABELLED:
        raise BadInput(f"{record.id} has no answer, which rows of {format} need", code="no_label")
    return _with_meta(write(record), record, format)


def _with_meta(row: Row, record: Question, format: str) -> Row:
    """The row with the columns that the record was read with, unless they make it another format's."""
    full = {**{key: value for key, value in record.meta.items() if key != "system"}, **row}
    return full if [name for name, entry in FORMATS.items() if entry.matches(set(full))] == [format] else row


def write_chat(
    record: Demonstration, format: str, images: Sequence[Sequence[str]] | None = None, dialect: str = ""
) -> Row:
    """The row of a demonstration, its calls in ``dialect``, by default that of its row, or of the format.

    ``images``: the files that each call returned, by default those of its row. BadInput for what cannot be
    expressed.
    """
    known = load_format(format) if format in FORMATS else None
    if known is None or known.write_chat is None:
        names = ", ".join(name for name in FORMATS if load_format(name).write_chat)
        raise BadInput(
            f"demonstrations cannot be written as `{format}`",
            code="unknown_format",
            fix=f"use one of {names}",
        )
    if record.history:
        raise BadInput(
            f"{record.id}: rows of {format} hold no earlier questions", fix="write rows of Pixelis"
        )
    calls, rows = chat.calls_of(record), [turn.verbatim for turn in record.turns if turn.verbatim is not None]
    if images is None:
        images = [turn.verbatim.images for turn in calls if turn.verbatim is not None]
    if len(images) != len(calls):
        raise BadInput(
            f"{record.id} calls {len(calls)} operations, but images of {len(images)} are given",
            code="media_count",
            fix="give the files that each operation returned, an empty list for one that returned none",
        )
    dialect = dialect or (rows[0].dialect if rows else known.dialect)
    row = known.write_chat(record, chat.render_replies(record, dialect, images), list(map(list, images)))
    return _with_meta(row, record, format)
