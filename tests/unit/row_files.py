"""Files of rows, and the one record or bad row in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.formats import read_records
from pixelis.records import Question


def write(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    path = folder / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif name.endswith("json"):
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def one(source: str) -> Question:
    (record,) = list(read_records(source))
    assert isinstance(record, Question), record
    return record


def refused(source: str, kind: type[Question] = Question) -> BadRow:
    (row,) = list(read_records(source, kind))
    assert isinstance(row, BadRow), row
    return row
