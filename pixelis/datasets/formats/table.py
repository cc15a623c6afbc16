"""Plain tables: question, answer and media in columns of usual names, or that the source names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from string import ascii_uppercase as LETTERS

from pixelis.datasets import fields
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import Format, Row, find_columns, first_column
from pixelis.datasets.formats.chat import read_chat
from pixelis.datasets.formats.columns import Columns
from pixelis.datasets.formats.messages import turns_of
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Question
from pixelis.rewards.scorers import option_lines


def plain(named: Mapping[str, str]) -> Format:
    def read(row: Row, name: str, root: MediaRoot, reply: bool = False) -> Question | list[Question]:
        columns = Columns(*find_columns(row, named))
        row = _with_options(row, columns)
        if isinstance(answer := row.get(columns.answers), list) and any(
            isinstance(item, dict) for item in answer
        ):
            chat = [*columns.chat(row, root), *turns_of(row, columns.answers, root)]
            return read_chat(
                row, name, chat, columns.question, columns.answers, columns.images, columns.videos, "history"
            )
        return columns.demonstrate(row, name, root) if reply else columns.read(row, name, root)

    return Format(read, demonstrate=lambda row, name, root: read(row, name, root, reply=True))


def _with_options(row: Row, columns: Columns) -> Row:
    """The row with an instruction's input and the options in the question, and a letter as the answer."""
    question, answer, images = (
        row.get(column) for column in (columns.question, columns.answers, columns.images)
    )
    row = dict(row)
    if isinstance(images, str) and images.startswith("["):
        row[columns.images] = fields.parse_json(images.replace("'", '"'), columns.images, list)
    if columns.question.lower() == "instruction" and row.get("input"):
        question = f"{question}\n{row.pop('input')}"
    if isinstance(question, str) and (options := _options(row)) and not option_lines(question):
        question = "\n".join(
            [question, *(f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False))]
        )
        written = str(answer).strip()
        if written in options:
            row[columns.answers] = LETTERS[options.index(written)]
        elif written.isdecimal():
            if int(written) >= len(options):
                raise RowError(
                    columns.answers, "no_label", f"{written} is none of the options 0 to {len(options) - 1}"
                )
            row[columns.answers] = LETTERS[int(written)]
    row[columns.question] = question
    return row


def _options(row: Row) -> list[str]:
    """The options of a question: a list in ``options`` or ``choices``, or the columns A, B, ..."""
    value = row.get(first_column(row, ("options", "choices")))
    if isinstance(value, str) and value.startswith("["):
        value = fields.parse_json(value.replace("'", '"'), "options", list)
    if isinstance(value, dict):
        value = value.get("text", list(value.values()))
    if not isinstance(value, list):
        value = [
            row[letter]
            for letter in itertools.takewhile(lambda name: row.get(name) not in (None, ""), LETTERS)
        ]
    return [str(option).strip() for option in value] if 1 < len(value) <= len(LETTERS) else []
