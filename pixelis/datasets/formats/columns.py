"""Rows with a column each for question, answer and media: Reason-RFT, TTRL, Mini-o3, R1-V, EasyR1."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pixelis.datasets import fields
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import Format, Row, first_column, scorer_of
from pixelis.datasets.formats.chat import read_chat
from pixelis.datasets.formats.messages import ChatTurn, reply_of, show_media, turns_of
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Question
from pixelis.rewards.scorers import option_lines

_TRANCE = re.compile(r"(?<![a-z])trance", re.IGNORECASE)
"""In the ids of questions about transformations, whose answers are sequences of functions."""


@dataclass(frozen=True)
class Columns:
    """Which column holds which field of a question.

    Rows without ``id`` or ``task`` may have ``id`` and ``data_source``. ``scorer``: of answers that are no
    letters. ``unlabelled``: rows may lack the answer, and the scorer follows from the question alone.
    """

    question: str
    answers: str
    images: str = ""
    videos: str = ""
    id: str = ""
    task: str = ""
    scorer: str = "math"
    split: str = "train"
    unlabelled: bool = False

    @property
    def format(self) -> Format:
        return Format(self.read, self.demonstrate)

    def read(self, row: Row, name: str, root: MediaRoot) -> Question:
        missing = self.unlabelled and row.get(self.answers) in (None, "", [])
        answers = None if missing else fields.answers(row, self.answers)
        question = self._record(row, name, self.chat(row, root), answers, asks=True)
        question.scorer = scorer_of(answers or [], self.scorer)
        if self.unlabelled:
            question.scorer = "mc_letter" if option_lines(question.question) else self.scorer
        if _TRANCE.search(question.id):
            question.scorer = "func_seq"
        return question

    def demonstrate(self, row: Row, name: str, root: MediaRoot) -> Question:
        """The question with its first answer as a reply, which the dialect writes if it has no tags."""
        answers = fields.answers(row, self.answers)
        chat = [*self.chat(row, root), ChatTurn("assistant", reply_of(row[self.answers]))]
        question = self._record(row, name, chat, answers)
        question.scorer = scorer_of(answers, self.scorer)
        return question

    def _record(
        self, row: Row, name: str, chat: list[ChatTurn], answers: list[str] | None, asks: bool = False
    ) -> Question:
        task = self.task or "data_source"
        used = (self.question, self.answers, self.images, self.videos, "history", task, self.id)
        question = read_chat(row, name, chat, *used, truths=answers, asks=asks, own_words=False)[-1]
        question.id = fields.identifier(row, *filter(None, (self.id, "id"))) or name
        question.task, question.split = fields.identifier(row, task) or "qa", self.split
        return question

    def chat(self, row: Row, root: MediaRoot) -> list[ChatTurn]:
        """The exchanges that ``history`` lists as pairs, and the question, perhaps as messages."""
        turns = list[ChatTurn]()
        for pair in fields.optional(row, "history", list, []):
            if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
                raise RowError("history", "wrong_type", "expected pairs of a question and its answer")
            turns += [ChatTurn("user", pair[0]), ChatTurn("assistant", pair[1])]
        if isinstance(row.get(self.question), list):
            turns += turns_of(row, self.question, root)
        else:
            turns.append(ChatTurn("user", fields.text(row, self.question)))
        return show_media(turns, root.media(row, self.images, self.videos), self.question)


EASYR1 = Columns("problem", "answer", images="images", videos="videos").format
MINI_O3 = Columns(
    "problem", "solution", images="images", id="doc_id", task="data_source", scorer="judge"
).format
R1V = Columns("problem", "solution", images="image").format
R1V_EVALUATION = Columns("question", "ground_truth", images="image_path", split="test").format
REASON_RFT = Columns("problem", "answer", images="image", id="id").format
REASON_RFT_TEXT = Columns("problem", "solution", id="id").format
_TTRL = Columns("prompt", "answer", id="id", task="source", unlabelled=True)


def _read_ttrl(row: Row, name: str, root: MediaRoot) -> Question:
    record = _TTRL.read(row, name, root)
    if fields.identifier(row, "source") and fields.identifier(row, "id"):  # unique within its source
        record.id = f"{record.task}-{record.id}"
    return record


def _read_cot(row: Row, name: str, root: MediaRoot) -> list[Question]:
    question = ChatTurn("user", fields.text(row, "problem"), root.media(row, "image"))
    chat = [question, ChatTurn("assistant", fields.text(row, "cot"))]
    column = first_column(row, ("answer", "solution"))
    truths = fields.answers(row, column) if column else None
    return read_chat(row, name, chat, "cot", "problem", "image", "answer", truths=truths)


TTRL = Format(_read_ttrl, _TTRL.demonstrate)
REASON_RFT_COT = Format(_read_cot)
