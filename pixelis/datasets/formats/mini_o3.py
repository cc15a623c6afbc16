"""Mini-o3's reinforcement learning rows ``{images, doc_id, problem, solution, data_source}``; its chats are of ``sharegpt``."""

from __future__ import annotations

from pixelis.datasets.formats.base import Row
from pixelis.datasets.formats.table import Columns
from pixelis.records import Question

COLUMNS = Columns(
    question="problem",
    answers="solution",
    images="images",
    id="doc_id",
    task="data_source",
    scorer="judge",
    placeholder="<image>\n",
)


def _write(record: Question) -> Row:
    return {"images": [], **COLUMNS.write(record)}


FORMATS = {"mini_o3": COLUMNS.format("problem solution", _write, any_of="doc_id images", excluded="answer image cot")}
