"""Questions through Ray Data: the order of a plain loop, resumption at any number, and reports of bad rows."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from pathlib import Path

import pytest

from pixelis.actors.cluster import unwrap_ray_error
from pixelis.config import DataConfig
from pixelis.datasets.bad_rows import BadRow
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


def test_the_stream_equals_the_plain_loop_over_epochs_and_resumes_at_any_number(tmp_path: Path) -> None:
    data = DataConfig(train=file(tmp_path / "a.jsonl", 70, bad={3, 50}), max_bad_rows=2, shuffle_rows=16)
    plain = read_questions(data.train, seed=4, max_bad_rows=2, shuffle_rows=16)
    expected: list[Question] = list(itertools.islice(plain, 160))
    bad_rows: list[BadRow] = []
    stream = question_stream(data, 4, 0, bad_rows.append)
    assert list(itertools.islice(stream, 150)) == expected[:150]
    stream.close()  # type: ignore[attr-defined]
    assert [(row.row, row.column, row.code) for row in bad_rows] == [
        ("4", "question", "wrong_type"),
        ("51", "question", "wrong_type"),
    ]
    resumed = question_stream(data, 4, 90)
    assert list(itertools.islice(resumed, 60)) == expected[90:150]
    resumed.close()  # type: ignore[attr-defined]


def test_the_stream_of_cards_equals_the_plain_loop() -> None:
    stream = question_stream(DataConfig(train="cards:?split=validation"), 3, 7)
    assert list(itertools.islice(stream, 60)) == list(itertools.islice(read_questions("cards:?split=validation", 3, 7), 60))
    stream.close()  # type: ignore[attr-defined]


def test_too_many_bad_rows_end_the_stream_with_a_typed_error(tmp_path: Path) -> None:
    data = DataConfig(train=file(tmp_path / "a.jsonl", 40, bad={30, 31}), max_bad_rows=1, shuffle_rows=8)
    stream = question_stream(data, 4, 0)
    with pytest.raises(Exception, match=r"row") as caught:
        list(stream)
    error = unwrap_ray_error(caught.value)
    assert isinstance(error, BadInput)
    assert "wrong_type 2" in error.message
    assert "a.jsonl, row 31, column question" in error.message


def test_the_reader_stays_a_bounded_number_of_rows_ahead(tmp_path: Path) -> None:
    """Take a few of 60 MB of rows; the reader's position in the file then stops advancing."""
    data = DataConfig(train=file(tmp_path / "a.jsonl", 55_000), shuffle_rows=16)
    stream = question_stream(data, 4, 0)
    assert len(list(itertools.islice(stream, 40))) == 40
    offsets = [0]
    for _ in range(8):
        time.sleep(0.25)
        offsets.append(read_offset(data.train))
    stream.close()  # type: ignore[attr-defined]
    assert 0 < offsets[-1] < 20e6
    assert offsets[-1] == offsets[-3]


def read_offset(path: str) -> int:
    """Return the offset in bytes of the process that has the file open; 0 if none has."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == path:
                return int((link.parents[1] / "fdinfo" / link.name).read_text().split()[1])
    return 0
