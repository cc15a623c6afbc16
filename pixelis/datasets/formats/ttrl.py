"""TTRL's rows: JSON ``{prompt, answer, source, id}``, and parquet rows of verl without media; both may lack the answer."""

from __future__ import annotations

from pixelis.datasets import fields
from pixelis.datasets.formats import verl
from pixelis.datasets.formats.base import IMAGES, VIDEOS, Format, Row, image_paths
from pixelis.datasets.formats.table import Columns
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Question

COLUMNS = Columns(question="prompt", answers="answer", id="id", task="source", unlabelled=True)


def _read(row: Row, name: str, root: MediaRoot) -> Question:
    record = COLUMNS.read(row, name, root)
    if fields.identifier(row, "source") and fields.identifier(row, "id"):
        return record.model_copy(update={"id": f"{record.task}-{record.id}"})
    return record


def _write(record: Question) -> Row:
    row, prefix = COLUMNS.write(record), f"{record.task}-"
    if record.id.startswith(prefix):
        return row | {"id": record.id.removeprefix(prefix)}
    del row["source"]  # it would become a prefix of the id
    return row


def _write_parquet(record: Question) -> Row:
    image_paths(record, 0)
    return verl.write_chat_row(record, "rule", "math")


FORMATS = {
    "ttrl": Format(
        "prompt",
        _read,
        _write,
        demonstrate=COLUMNS.demonstrate,
        any_of="answer source",
        excluded=" ".join(("reward_model", *IMAGES, *VIDEOS)),
    ),
    "ttrl_parquet": Format("prompt reward_model", verl.read_chat_row, _write_parquet, excluded="images videos env_name"),
}
