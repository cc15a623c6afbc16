"""Questions through Ray Data: the order of a plain loop, resumption, and reports of bad rows."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.config import DataConfig
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.files import PART_BYTES
from pixelis.datasets.formats import Records
from pixelis.datasets.questions import read_questions
from pixelis.datasets.stream import question_stream
from pixelis.errors import BadInput
from pixelis.records import Question

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def file(path: Path, count: int, bad: set[int] = frozenset()) -> str:  # type: ignore[assignment]
    rows = [
        {"id": f"q{i}", "question": "?" * (i not in bad) or 5, "answers": ["1"], "meta": {"text": "x" * 1000}}
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def taken(stream: Iterator[Question], count: int) -> list[Question]:
    """The first questions; closes the stream."""
    questions = list(itertools.islice(stream, count))
    stream.close()  # type: ignore[attr-defined]
    return questions


def test_demonstrations_are_questions_without_their_turns(tmp_path: Path) -> None:
    row = {"id": "d", "question": "What?", "answers": ["7"], "turns": [{"think": "It is 7", "answer": "7"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row), encoding="utf-8")
    (question,) = taken(question_stream(DataConfig(train=str(tmp_path / "a.jsonl")), 4), 1)
    assert question.model_dump() == Question(id="d", question="What?", answers=["7"]).model_dump()
    assert question.origin == (str(tmp_path / "a.jsonl"), "1")


@pytest.mark.parametrize("suffix", ["jsonl", pytest.param("parquet", marks=pytest.mark.long)])
def test_several_tasks_read_a_large_source_in_the_order_of_the_plain_loop_and_resume_at_any_number(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of several parts each, more than once; bad rows and rows without an id are named by their line."""
    monkeypatch.setattr("pixelis.datasets.stream.PART_BYTES", 20_000)
    monkeypatch.setattr("pixelis.datasets.files.CHUNK", 4096)
    for name in ("a", "b"):
        rows = [{"prompt": f"{name}{i}?", "answer": "1", "text": f"{name}{i} " * 100} for i in range(250)]
        if suffix == "jsonl":
            lines = [*map(json.dumps, rows)]
            lines[120], lines[180] = "{torn", ""
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        else:
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet", row_group_size=20)
    data = DataConfig(train=str(tmp_path), max_bad_rows=2, shuffle_rows=64)
    records, files = Records.open(data.train)
    assert len(records.parts(files, 20_000)) >= 6
    expected_bad: list[BadRow] = []
    options = {"max_bad_rows": 2, "shuffle_rows": 64, "on_bad_row": expected_bad.append}
    expected = list(itertools.islice(read_questions(data.train, 4, **options), 700))
    bad: list[BadRow] = []
    assert taken(question_stream(data, 4, 0, bad.append), 700) == expected
    assert bad == expected_bad
    assert len(bad) == (2 if suffix == "jsonl" else 0)
    assert taken(question_stream(data, 4, 430), 120) == expected[430:550]


def test_too_many_bad_rows_end_the_stream_with_a_typed_error(tmp_path: Path) -> None:
    data = DataConfig(train=file(tmp_path / "a.jsonl", 40, bad={30, 31}), max_bad_rows=1, shuffle_rows=8)
    stream = question_stream(data, 4, 0)
    with pytest.raises(Exception, match=r"row") as caught:
        list(stream)
    error = unwrap_ray_error(caught.value)
    assert isinstance(error, BadInput)
    assert "wrong_type 2" in error.message
    assert "a.jsonl, row 31 (q30), column question" in error.message


def read_offsets(path: str) -> list[int]:
    """Return the offsets in bytes of the processes that have the file open."""
    offsets = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == path:
                offsets.append(int((link.parents[1] / "fdinfo" / link.name).read_text().split()[1]))
    return sorted(offsets)


def test_the_readers_stay_a_bounded_number_of_rows_ahead(tmp_path: Path) -> None:
    """A few of 60 MB of rows, which are two parts: the readers' positions in the file then stop."""
    data = DataConfig(train=file(tmp_path / "a.jsonl", 55_000), shuffle_rows=16)
    stream = question_stream(data, 4, 0)
    assert len(list(itertools.islice(stream, 40))) == 40
    offsets: list[list[int]] = []
    while len(offsets) < 120 and (len(offsets) < 6 or offsets[-1] != offsets[-6]):
        time.sleep(0.25)
        offsets.append(read_offsets(data.train))
    stream.close()  # type: ignore[attr-defined]
    assert offsets[-1]
    assert offsets[-1] == offsets[-6]
    assert all(offset % PART_BYTES < 20e6 for offset in offsets[-1])
