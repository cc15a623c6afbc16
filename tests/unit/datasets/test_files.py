"""Files of rows: every kind gives the same rows, streams, and says what is wrong and where."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from pixelis.datasets import files
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.files import Row, Source, read_file
from pixelis.datasets.source_options import parse_options
from pixelis.errors import BadInput, MissingFile

LOCAL = fs.LocalFileSystem()
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ROWS = st.lists(
    st.dictionaries(TEXT, TEXT | st.integers(-9, 9) | st.none() | st.lists(TEXT, max_size=2), max_size=3),
    max_size=8,
)


def read(path: Path) -> list[Any]:
    return [row.values if isinstance(row, Row) else row for row in read_file(LOCAL, str(path))]


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, indent=st.sampled_from([None, 2]), chunk=st.integers(1, 40))
def test_rows_come_back_from_json_however_it_is_laid_out(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict], indent: int | None, chunk: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    text = json.dumps(rows, indent=indent, ensure_ascii=indent is None)
    (folder / "a.json").write_text(text, encoding="utf-8")
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "b.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "a.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK", chunk)
        for name in ("a.json", "a.jsonl", "b.json", "a.jsonl.gz"):
            assert read(folder / name) == rows, name


def test_a_parquet_file_gives_its_rows_in_order_with_nested_and_binary_columns(tmp_path: Path) -> None:
    rows = [{"id": i, "image": {"bytes": bytes([i]), "path": None}, "answer": [str(i)]} for i in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    assert read(tmp_path / "a.parquet") == rows
    assert [row.number for row in read_file(LOCAL, str(tmp_path / "a.parquet"))] == list(range(1, 51))


@pytest.mark.parametrize("name", ["big.parquet", "big.json", "big.jsonl"])
def test_a_file_larger_than_the_memory_limit_is_streamed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 MB of rows in one row group, or one list, with 1 MB at a time."""
    monkeypatch.setattr(files, "BATCH_BYTES", 1 << 20)
    path, line = tmp_path / name, "x" * 100_000
    if name.endswith("parquet"):
        values = [str(i).zfill(6) + line for i in range(400)]
        pages = {"use_dictionary": False, "write_batch_size": 4, "data_page_size": 1 << 16}
        pq.write_table(pa.table({"a": values}), path, compression="none", **pages)
        del values
    else:
        left, between, right = ("[", ",", "]") if name.endswith("json") else ("", "\n", "")
        with path.open("w") as out:
            out.write(left + json.dumps({"a": line}))
            for _ in range(399):
                out.write(between + json.dumps({"a": line}))
            out.write(right)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    count = peak = 0
    for count, _ in enumerate(read_file(LOCAL, str(path)), 1):  # noqa: B007
        peak = max(peak, pa.total_allocated_bytes() - before)
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 400
    assert python + peak < 12e6


def test_a_line_that_is_no_row_is_a_value_and_the_next_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": \n[1]\n{"a": "\xff"}\n' + b"[" * 100_000 + b'\n{"a": 2}')
    good, *bad, last = read_file(LOCAL, str(path))
    assert (good, last) == (Row(str(path), 1, {"a": 1}), Row(str(path), 7, {"a": 2}))
    assert all(isinstance(row, BadRow) for row in bad)
    expected = [("3", "not_json"), ("4", "not_an_object"), ("5", "not_utf8"), ("6", "not_json")]
    assert [(row[1], row[3]) for row in bad] == expected


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", '[{"a": 1}, {"a": ', ("row 2", "not JSON")),
        ("a.json", '[{"a": 1}', ("row 2", "not JSON")),
        ("a.json", '[{"a": 1}, nonsense]', ("row 2", "not JSON")),
        ("a.json", '[{"a": 1}, {"a": ' + 5000 * "1" + "}]", ("row 2", "not JSON")),
        ("a.parquet", "no parquet", ("a.parquet", "cannot be read")),
        ("a.jsonl.gz", "no gzip", ("a.jsonl.gz", "cannot be read")),
    ],
)
def test_a_damaged_file_is_named_with_the_row(
    tmp_path: Path, name: str, content: str, words: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInput) as caught:
        read(tmp_path / name)
    assert all(word in caught.value.message for word in words)


def test_a_folder_is_its_files_by_name_whatever_lies_beside_them(tmp_path: Path) -> None:
    beside = (".hidden/x.jsonl", "_tmp.jsonl", "readme.md", "lineage.json", "b.jsonl.lineage.json")
    for name in ("b.jsonl", "a/z.parquet", "a/c.json", "a/my_lineage.json", *beside):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    _, root, result = Source.of(str(tmp_path)).files()
    assert root == str(tmp_path)
    names = [Path(path).relative_to(tmp_path).as_posix() for path in result]
    assert names == ["a/c.json", "a/my_lineage.json", "a/z.parquet", "b.jsonl"]


def test_a_filesystem_is_named_by_its_uri(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    system, _, result = Source.of(f"file://{tmp_path}?format=r1v").files()
    assert [row.values for row in read_file(system, result[0]) if isinstance(row, Row)] == [{"a": 1}]
    bucket, path = Source.of("s3://bucket/rows.parquet?region=eu-west-1&format=r1v").open()
    assert (bucket.type_name, bucket.region, path) == ("s3", "eu-west-1", "bucket/rows.parquet")


def test_a_plus_in_a_source_is_a_plus() -> None:
    assert Source.of("/d/a+b #1/rows.jsonl?media=c+d: 2").media == "c+d: 2"
    assert parse_options("x+y:/d/a+b?split=train+val", ["split"]) == ("x+y:/d/a+b", {"split": "train+val"})


@pytest.mark.parametrize("source", ["a.jsonl?formt=r1v", "nowhere://bucket/a.jsonl"])
def test_an_unknown_option_of_a_source_is_refused(source: str) -> None:
    with pytest.raises(BadInput) as caught:
        Source.of(source).files()
    assert caught.value.fix


def test_a_missing_path_an_empty_folder_and_a_file_without_rows_are_three_errors(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_text("")
    with pytest.raises(MissingFile, match="does not exist"):
        Source.of(str(tmp_path / "no")).files()
    for path, word in ((tmp_path, "contains no"), (tmp_path / "picture.png", "no file of rows")):
        with pytest.raises(BadInput, match=word):
            Source.of(str(path)).files()
