"""Reason-RFT's rows ``{id, image, problem, solution, answer}``, without ``image`` for text, and its sets with a chain of thought.

``cot`` is the whole reply of the assistant. The chats that its converter writes are the ``messages`` of ``sharegpt``.
"""

from __future__ import annotations

from pixelis.datasets import fields
from pixelis.datasets.formats.base import Format, Row, first_column, image_paths, marked
from pixelis.datasets.formats.chat import read_chat
from pixelis.datasets.formats.messages import ChatTurn
from pixelis.datasets.formats.table import Columns
from pixelis.datasets.media_root import MediaRoot
from pixelis.errors import BadInput
from pixelis.records import Demonstration, Question

COLUMNS = Columns(question="problem", answers="answer", images="image", id="id")
TEXT = Columns(question="problem", answers="solution", id="id")


def _write(record: Question) -> Row:
    row = _with_image(COLUMNS.write(record))
    return row | {"solution": record.meta.get("solution", f"<answer>{(record.answers or [''])[0]}</answer>")}


def _write_text(record: Question) -> Row:
    return TEXT.write(record) | {"solution": f"<answer>{(record.answers or [''])[0]}</answer>"}


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


def _with_image(row: Row) -> Row:
    """The row with one image as text instead of a list, and without an empty list."""
    paths = row.pop("image", [])
    return row | ({"image": paths[0] if len(paths) == 1 else paths} if paths else {})


FORMATS = {
    "reason_rft": COLUMNS.format("problem solution answer", _write, excluded="doc_id cot"),
    "reason_rft_text": TEXT.format("problem solution", _write_text, excluded="answer image images image_path doc_id cot"),
    "reason_rft_cot": Format("problem cot", _read_cot, write_chat=_write_cot, dialect="plain", excluded="doc_id"),
}
