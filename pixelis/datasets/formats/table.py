"""Plain tables: question, answer and media in columns of usual names, or that the source names."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from string import ascii_uppercase as LETTERS

from pixelis.datasets import fields
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import Format, Row, choices, find_columns, first_column
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
        answer = row.get(columns.answers)
        if isinstance(answer, list) and any(isinstance(item, dict) for item in answer):
            chat = [*columns.chat(row, root), *turns_of(row, columns.answers, root)]
            used = columns.question, columns.answers, columns.images, columns.videos, "history"
            return read_chat(row, name, chat, *used)
        return columns.demonstrate(row, name, root) if reply else columns.read(row, name, root)

    return Format(read, demonstrate=functools.partial(read, reply=True))


def _with_options(row: Row, columns: Columns) -> Row:
    row = dict(row)
    question, images = row.get(columns.question), row.get(columns.images)
    if isinstance(images, str) and images.startswith("["):
        row[columns.images] = fields.parse_json(images.replace("'", '"'), columns.images, list)
    if columns.question.lower() == "instruction" and row.get("input"):
        question = f"{question}\n{row.pop('input')}"
    if isinstance(question, str) and (options := _options(row)) and not option_lines(question):
        question = choices(question, options)
        written = str(row.get(columns.answers)).strip()
        index = options.index(written) if written in options else int(written) if written.isdecimal() else -1
        if index >= len(options):
            message = f"{written} is none of the options 0 to {len(options) - 1}"
            raise RowError(columns.answers, "no_label", message)
        if index >= 0:
            row[columns.answers] = LETTERS[index]
    row[columns.question] = question
    return row


def _options(row: Row) -> list[str]:
    value = row.get(first_column(row, ("options", "choices")))
    if isinstance(value, str) and value.startswith("["):
        value = fields.parse_json(value.replace("'", '"'), "options", list)
    if isinstance(value, dict):
        value = value.get("text", list(value.values()))
    if not isinstance(value, list):
        value = list(itertools.takewhile(lambda cell: cell not in (None, ""), map(row.get, LETTERS)))
    return [str(option).strip() for option in value] if 1 < len(value) <= len(LETTERS) else []
