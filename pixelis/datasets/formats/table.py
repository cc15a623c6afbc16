"""Tables: rows with a question, its answer and its media in columns, as most people have them.

Other systems name the columns in their own way (``Columns``); a plain table names them as people do (``plain``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_uppercase as LETTERS

from pixelis.datasets import fields
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import (
    ANSWERS,
    IMAGES,
    VIDEOS,
    Format,
    Row,
    first_column,
    image_paths,
    marked,
    scorer_of,
    whole_clip,
)
from pixelis.datasets.formats.chat import read_chat
from pixelis.datasets.formats.messages import ChatTurn, reply_of, show_media, turns_of
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Question
from pixelis.rewards.scorers import option_lines

QUESTIONS = ("question", "problem", "query", "prompt", "instruction")
_TRANCE = re.compile(r"(?<![a-z])trance", re.IGNORECASE)
"""In the ids of Reason-RFT's questions about transformations, whose answers are sequences of functions."""


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

    def format(
        self, required: str, write: Callable[[Question], Row] | None = None, any_of: str = "", excluded: str = ""
    ) -> Format:
        """The format of rows with these columns, see ``Format``."""
        return Format(required, self.read, write or self.write, demonstrate=self.demonstrate, any_of=any_of, excluded=excluded)

    def read(self, row: Row, name: str, root: MediaRoot) -> Question:
        """The question of a row; RowError names the column that cannot be used."""
        unlabelled = self.unlabelled and row.get(self.answers) in (None, "", [])
        answers = None if unlabelled else fields.answers(row, self.answers)
        question = self._records(row, name, self.chat(row, root), answers, asks=True)
        scorer = scorer_of(answers or [], self.scorer)
        if self.unlabelled:
            scorer = "mc_letter" if option_lines(question.question) else self.scorer
        return question.model_copy(update={"scorer": "func_seq" if _TRANCE.search(question.id) else scorer})

    def demonstrate(self, row: Row, name: str, root: MediaRoot) -> Question:
        """The question with its first answer as a reply, which the dialect writes if it has no tags; RowError as `read`."""
        answers = fields.answers(row, self.answers)
        chat = [*self.chat(row, root), ChatTurn("assistant", reply_of(row[self.answers]))]
        return self._records(row, name, chat, answers).model_copy(update={"scorer": scorer_of(answers, self.scorer)})

    def _records(self, row: Row, name: str, chat: list[ChatTurn], answers: list[str] | None, asks: bool = False) -> Question:
        task = self.task or "data_source"
        used = (self.question, self.answers, self.images, self.videos, "history", task, self.id)
        question = read_chat(row, name, chat, *used, truths=answers, asks=asks, own_words=False)[-1]
        own_id = fields.identifier(row, *filter(None, (self.id, "id"))) or name
        return question.model_copy(update={"id": own_id, "task": fields.identifier(row, task) or "qa", "split": self.split})

    def chat(self, row: Row, root: MediaRoot) -> list[ChatTurn]:
        """The earlier exchanges, which a ``history`` lists as pairs, and the question, which may be a list of messages."""
        history = fields.optional(row, "history", list, [])
        if not all(isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in history):
            raise RowError("history", "wrong_type", "expected a list of pairs of a question and its answer")
        turns = [ChatTurn(("user", "assistant")[i], text) for pair in history for i, text in enumerate(pair)]
        if isinstance(row.get(self.question), list):
            turns += turns_of(row, self.question, root)
        else:
            turns.append(ChatTurn("user", fields.text(row, self.question)))
        return show_media(turns, root.media(row, self.images, self.videos), self.question)

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


# -- plain tables -----------------------------------------------------------------------------------------------------------


def find_columns(row: Row, named: Mapping[str, str]) -> Columns:
    """The columns of a plain table: those ``named`` as question, answer and image, otherwise those that people call so.

    RowError ``missing_column`` or ``ambiguous_columns``, with the columns of the row.
    """
    existing = {name.strip().lower(): name for name in reversed(row)}
    there = f"the columns are {', '.join(row)}"

    def find(role: str, names: tuple[str, ...]) -> str:
        if (column := named.get(role)) is not None:
            if column not in row:
                raise RowError(column, "missing_column", f"is missing; {there}")
            return column
        matching = [existing[name] for name in names if name in existing]
        if role == "image":
            return first_column(row, matching)
        if not matching:
            raise RowError(role, "missing_column", f"is missing; {there}")
        if len(matching) > 1 and matching[0] != existing.get(role):
            raise RowError(role, "ambiguous_columns", f"may be {' or '.join(matching)}: name it with ?{role}=COLUMN")
        return matching[0]

    question, answers = find("question", QUESTIONS), find("answer", ANSWERS)
    return Columns(question, answers, find("image", IMAGES), first_column(row, VIDEOS))


def plain(named: Mapping[str, str]) -> Format:
    """The format of a plain table whose columns are ``named`` as question, answer and image, or called so."""

    def read(row: Row, name: str, root: MediaRoot, reply: bool = False) -> Question | list[Question]:
        columns = find_columns(row, named)
        row = _as_meant(row, columns)
        if isinstance(answer := row.get(columns.answers), list) and any(isinstance(item, dict) for item in answer):
            chat = [*columns.chat(row, root), *turns_of(row, columns.answers, root)]
            return read_chat(row, name, chat, columns.question, columns.answers, columns.images, columns.videos, "history")
        return columns.demonstrate(row, name, root) if reply else columns.read(row, name, root)

    def demonstrate(row: Row, name: str, root: MediaRoot) -> Question | list[Question]:
        return read(row, name, root, reply=True)

    return Format("", read, demonstrate=demonstrate)


def _as_meant(row: Row, columns: Columns) -> Row:
    """The row with an instruction's input and the options as lines in its question, and the letter of an option as its answer."""
    question, answer, images = (row.get(column) for column in (columns.question, columns.answers, columns.images))
    row = dict(row)
    if isinstance(images, str) and images.startswith("["):
        row[columns.images] = fields.parse_json(images.replace("'", '"'), columns.images, list)
    if columns.question.lower() == "instruction" and row.get("input"):
        question = f"{question}\n{row.pop('input')}"
    if isinstance(question, str) and (options := _options(row)) and not option_lines(question):
        question = "\n".join([question, *(f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False))])
        written = str(answer).strip()
        if written in options:
            row[columns.answers] = LETTERS[options.index(written)]
        elif written.isdecimal():
            if int(written) >= len(options):
                raise RowError(columns.answers, "no_label", f"{written} is none of the options 0 to {len(options) - 1}")
            row[columns.answers] = LETTERS[int(written)]
    row[columns.question] = question
    return row


def _options(row: Row) -> list[str]:
    """The options of a question: a list in ``options`` or ``choices``, or the columns A, B, ...; empty without."""
    value = row.get(first_column(row, ("options", "choices")))
    if isinstance(value, str) and value.startswith("["):
        value = fields.parse_json(value.replace("'", '"'), "options", list)
    if isinstance(value, dict):
        value = value.get("text", list(value.values()))
    if not isinstance(value, list):
        value = [row[letter] for letter in itertools.takewhile(lambda name: row.get(name) not in (None, ""), LETTERS)]
    return [str(option).strip() for option in value] if 1 < len(value) <= len(LETTERS) else []


FORMATS = {"table": plain({})}
