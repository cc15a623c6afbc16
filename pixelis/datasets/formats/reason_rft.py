"""Reason-RFT's rows ``{id, image, problem, solution, answer}``; its chats are the ``messages`` of ``sharegpt``."""

from __future__ import annotations

from pixelis.datasets.formats.base import Columns, Format, Row
from pixelis.records import Question

COLUMNS = Columns(question="problem", answers="answer", images="image", id="id")


def _write(record: Question) -> Row:
    row = COLUMNS.write(record) | {"solution": f"<answer>{(record.answers or [''])[0]}</answer>"}
    if len(row.get("image", ())) == 1:
        (row["image"],) = row["image"]
    return row


FORMATS = {"reason_rft": Format("problem solution answer", COLUMNS.read, _write, excluded="doc_id")}
