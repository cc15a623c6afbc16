"""Rows with a column each for question, answer and media: Reason-RFT, TTRL, Mini-o3, R1-V, EasyR1."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pixelis.datasets import fields
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import (
    Format,
    Row,
    first_column,
    image_bytes,
    image_paths,
    marked,
    scorer_of,
    single_image,
    whole_clip,
)
from pixelis.datasets.formats.chat import read_chat
from pixelis.datasets.formats.messages import ChatTurn, reply_of, show_media, turns_of
from pixelis.datasets.media_root import MediaRoot
from pixelis.errors import BadInput
from pixelis.records import Demonstration, Question
from pixelis.rewards.scorers import option_lines

_TRANCE = re.compile(r"(?<![a-z])trance", re.IGNORECASE)
"""In the ids of questions about transformations, whose answers are sequences of functions."""


@dataclass(frozen=True)
class Columns:
    """Which column holds which field of a question.

    Rows without ``id`` or ``task`` may have ``id`` and ``data_source``. ``scorer``: of answers that are no
    letters. ``placeholder``: written before the question for each of its media. ``unlabelled``: rows may lack
    the answer, and the scorer follows from the question alone.
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

    def format(self, write: Callable[[Question], Row] | None = None) -> Format:
        return Format(self.read, write or self.write, demonstrate=self.demonstrate)

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

    def write(self, record: Question) -> Row:
        row: Row = {self.id: record.id} if self.id else {}
        row[self.question] = marked(record, self.placeholder)
        if answers := record.answers:
            row[self.answers] = answers[0] if len(answers) == 1 else list(answers)
        if self.task:
            row[self.task] = record.task
        clips = [whole_clip(record, item) for item in record.media if item.kind == "video" and self.videos]
        if clips:
            row[self.videos] = clips
        if paths := image_paths(record, None if self.images else 0, clips=bool(self.videos)):
            row[self.images] = paths
        return row


EASYR1_COLUMNS = Columns(
    question="problem", answers="answer", images="images", videos="videos", placeholder="<{}>"
)
EASYR1 = EASYR1_COLUMNS.format()

MINI_O3_COLUMNS = Columns(
    question="problem",
    answers="solution",
    images="images",
    id="doc_id",
    task="data_source",
    scorer="judge",
    placeholder="<image>\n",
)
MINI_O3 = MINI_O3_COLUMNS.format(lambda record: {"images": [], **MINI_O3_COLUMNS.write(record)})


# -- R1-V ----------------------------------------------------------------------------------------------------


def _write_r1v(record: Question) -> Row:
    solution = f"<answer> {(record.answers or [''])[0]} </answer>"
    return {"image": image_bytes(single_image(record)), "problem": record.question, "solution": solution}


R1V = Columns(question="problem", answers="solution", images="image").format(_write_r1v)
R1V_EVALUATION_COLUMNS = Columns(
    question="question", answers="ground_truth", images="image_path", split="test"
)
R1V_EVALUATION = R1V_EVALUATION_COLUMNS.format(
    lambda record: {**R1V_EVALUATION_COLUMNS.write(record), "image_path": single_image(record)}
)


# -- TTRL: ids are unique within their source ----------------------------------------------------------------

TTRL_COLUMNS = Columns(question="prompt", answers="answer", id="id", task="source", unlabelled=True)


def _read_ttrl(row: Row, name: str, root: MediaRoot) -> Question:
    record = TTRL_COLUMNS.read(row, name, root)
    if fields.identifier(row, "source") and fields.identifier(row, "id"):
        record.id = f"{record.task}-{record.id}"
    return record


def _write_ttrl(record: Question) -> Row:
    row, prefix = TTRL_COLUMNS.write(record), f"{record.task}-"
    if record.id.startswith(prefix):
        return row | {"id": record.id.removeprefix(prefix)}
    del row["source"]  # it would become a prefix of the id
    return row


TTRL = Format(_read_ttrl, _write_ttrl, demonstrate=TTRL_COLUMNS.demonstrate)


# -- Reason-RFT: rows of reinforcement learning, and with the assistant's whole reply as a chain of thought --

REASON_RFT_COLUMNS = Columns(question="problem", answers="answer", images="image", id="id")
REASON_RFT_TEXT_COLUMNS = Columns(question="problem", answers="solution", id="id")


def _solution(record: Question) -> str:
    return f"<answer>{(record.answers or [''])[0]}</answer>"


def _write_reason_rft(record: Question) -> Row:
    return _with_image(REASON_RFT_COLUMNS.write(record)) | {
        "solution": record.meta.get("solution", _solution(record))
    }


def _with_image(row: Row) -> Row:
    paths = row.pop("image", [])
    return row | ({"image": paths[0] if len(paths) == 1 else paths} if paths else {})


def _read_cot(row: Row, name: str, root: MediaRoot) -> list[Question]:
    question = ChatTurn("user", fields.text(row, "problem"), root.media(row, "image"))
    chat = [question, ChatTurn("assistant", fields.text(row, "cot"))]
    column = first_column(row, ("answer", "solution"))
    truths = fields.answers(row, column) if column else None
    return read_chat(row, name, chat, "cot", "problem", "image", "answer", truths=truths)


def _write_cot(record: Demonstration, replies: list[str], images: list[list[str]]) -> Row:
    if len(replies) != 1:
        raise BadInput(f"{record.id}: rows of this format hold one turn of the assistant, not {len(replies)}")
    row = {"id": record.id, "image": image_paths(record), "problem": marked(record, ""), "cot": replies[0]}
    return _with_image(row) | ({"answer": record.answers[0]} if record.answers else {})


REASON_RFT = REASON_RFT_COLUMNS.format(_write_reason_rft)
REASON_RFT_TEXT = REASON_RFT_TEXT_COLUMNS.format(
    lambda record: REASON_RFT_TEXT_COLUMNS.write(record) | {"solution": _solution(record)}
)
REASON_RFT_COT = Format(_read_cot, write_chat=_write_cot, dialect="plain")
