"""Questions and demonstrations by source: same order for the same arguments, resuming by number."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.questions import read_demonstrations, read_questions
from pixelis.errors import BadInput, MissingFile

ROWS = [{"id": f"q{i}", "question": f"What is {i}?", "answers": [str(i)]} for i in range(7)]


def write(path: Path, rows: list) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("questions") / "seven.jsonl", ROWS)


def ids(source: str, count: int | None = None, **arguments: int | None) -> list[str]:
    return [q.id for q in itertools.islice(read_questions(source, **arguments), count)]


def test_every_epoch_has_every_question_once_in_another_order(file: str) -> None:
    order = ids(file, epochs=3, seed=5)
    epochs = [order[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == sorted(row["id"] for row in ROWS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert order == ids(file, epochs=3, seed=5)
    assert order != ids(file, epochs=3, seed=6)


@given(st.integers(0, 40), st.integers(0, 9), st.integers(1, 4), st.none() | st.integers(0, 3))
def test_a_file_resumes_by_number_exactly(
    file: str, start: int, limit: int, epochs: int, seed: int | None
) -> None:
    whole = ids(file, seed=seed, limit=limit, epochs=epochs)
    assert len(whole) == epochs * min(limit or 7, 7)
    assert ids(file, seed=seed, limit=limit, epochs=epochs, start=start) == whole[start:]
    endless = ids(file, start + 9, seed=seed, limit=limit)
    assert ids(file, 9, seed=seed, limit=limit, start=start) == endless[start:]


@settings(deadline=None)  # the first one loads the digits
@given(start=st.integers(0, 20), limit=st.integers(1, 6))
def test_cards_resume_by_number_exactly(start: int, limit: int) -> None:
    whole = ids("cards:?split=validation", 25, seed=3, limit=limit)
    assert len(set(whole)) == limit
    assert ids("cards:?split=validation", 25 - start, seed=3, limit=limit, start=start) == whole[start:]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"id": "x", "question": ', ("row 3", "not JSON", "column")),
        ({"id": "x", "question": "?", "media": [{"id": "img0"}]}, ("row 3", "column media.0")),
        ({"id": "x", "question": "?", "anwsers": []}, ("row 3", "column anwsers")),
        ({"id": "q1", "question": "?"}, ("row 3", "'q1'", "earlier")),
        ([1, 2], ("row 3",)),
    ],
)
def test_a_bad_row_is_named_by_file_row_and_column(
    tmp_path: Path, row: object, words: tuple[str, ...]
) -> None:
    source = write(tmp_path / "bad.jsonl", [ROWS[0], ROWS[1], row])
    with pytest.raises(BadInput) as caught:
        list(read_questions(source, epochs=1))
    for word in ("bad.jsonl", *words):
        assert word in caught.value.message


def test_an_empty_file_is_an_error_and_not_an_endless_wait(tmp_path: Path) -> None:
    source = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(BadInput, match="no question"):
        next(read_questions(source))
    with pytest.raises(BadInput, match="no demonstration"):
        read_demonstrations(source, 3, seed=0, direct_share=0.5)


@pytest.mark.parametrize("source", ["cards:?split=dev", "cards:?seed=many", "cards:?spilt=test"])
def test_an_unknown_part_of_a_cards_source_is_named(source: str) -> None:
    with pytest.raises(BadInput, match=r"dev|many|spilt"):
        next(read_questions(source))
    with pytest.raises(BadInput, match=r"dev|many|spilt"):
        read_demonstrations(source, 1, seed=0, direct_share=0.5)


def with_bad(path: Path, good: int, bad: int) -> str:
    rows: list[dict] = [{"id": f"g{i}", "question": "?", "answers": ["1"]} for i in range(good)]
    for i in range(bad):
        rows.insert(2 + i * max(1, good // max(bad, 1)), {"id": f"b{i}", "question": i, "answers": ["1"]})
    return write(path, rows)


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 30), st.integers(0, 6), st.sampled_from([0, 1, 3, 0.1, 0.5]), st.none() | st.just(1))
def test_bad_rows_are_skipped_and_reported_once_up_to_the_budget_and_an_error_beyond(
    tmp_path_factory: pytest.TempPathFactory, good: int, bad: int, most: float, seed: int | None
) -> None:
    source = with_bad(tmp_path_factory.getbasetemp() / "some.jsonl", good, bad)
    told: list[BadRow] = []
    skipped = {"max_bad_rows": most, "shuffle_rows": 7, "on_bad_row": told.append}
    read = read_questions(source, seed=seed, epochs=2, **skipped)
    if bad > (most * (good + bad) if most < 1 else most):
        with pytest.raises(BadInput) as caught:
            list(read)
        assert "some.jsonl, row 3 (b0), column question" in caught.value.message
        assert f"wrong_type {len(told)}" in caught.value.message or most == 0
    else:
        assert [q.id for q in read].count("g0") == 2
        assert [row.code for row in told] == ["wrong_type"] * bad


@pytest.mark.parametrize("seed", [None, 1])
def test_a_share_of_bad_rows_counts_among_those_before_the_limit(tmp_path: Path, seed: int | None) -> None:
    source = with_bad(tmp_path / "some.jsonl", 20, 5)
    with pytest.raises(BadInput, match="4 bad rows of 16"):
        list(read_questions(source, seed=seed, epochs=1, limit=12, max_bad_rows=0.2))
    assert len(list(read_questions(source, seed=seed, epochs=1, limit=12, max_bad_rows=0.3))) == 12


def test_a_source_is_read_no_further_than_the_window_that_is_asked_for(tmp_path: Path) -> None:
    source = with_bad(tmp_path / "late.jsonl", 40, 0) + "?format=question"
    with open(tmp_path / "late.jsonl", "a", encoding="utf-8") as lines:
        lines.write("{broken\n")
    rows = read_questions(source, seed=3, shuffle_rows=10)
    window = {next(rows).id for _ in range(10)}
    assert window == {f"g{i}" for i in range(10)}, "windows follow the order of the file"
    assert len([next(rows) for _ in range(30)]) == 30
    with pytest.raises(BadInput, match="row 41"):
        next(rows)


def test_annotated_and_packaged_sources_are_read_by_the_same_function(tmp_path: Path) -> None:
    (question,) = itertools.islice(read_questions(f"packaged:coins?count=1&folder={tmp_path}"), 1)
    assert question.annotations.regions
    with pytest.raises(MissingFile, match="instances"):
        next(read_questions(f"coco:{tmp_path}?split=val2017"))
    with pytest.raises(BadInput, match="not demonstrations"):
        read_demonstrations("packaged:coins?count=1", 1, seed=0, direct_share=0.5)


def test_a_question_of_higher_weight_comes_more_often_and_resumes_exactly(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "id": f"w{i}", "meta": {"weight": 3.0 if i == 2 else 0.5}} for i in range(20)]
    source = write(tmp_path / "weighted.jsonl", rows)
    drawn = ids(source, 400, seed=4)
    assert 85 <= drawn.count("w2") <= 105, "3 of 12.5 by weight"
    assert all(drawn.count(f"w{i}") >= 8 for i in range(20))
    assert ids(source, 50, seed=4, start=137) == drawn[137:187]
    bad = write(tmp_path / "bad_weight.jsonl", [{**ROWS[0], "meta": {"weight": 0}}])
    with pytest.raises(BadInput, match="weight"):
        next(read_questions(bad, seed=0))


# -- demonstrations ------------------------------------------------------------------------------------------


def test_a_file_of_demonstrations_is_shuffled_by_seed_and_repeated_to_the_count(tmp_path: Path) -> None:
    rows = [{**row, "turns": [{"answer": row["answers"][0]}]} for row in ROWS]
    source = write(tmp_path / "shown.jsonl", rows)
    names = [row.id for row in read_demonstrations(source, 17, seed=2, direct_share=0.5)]
    assert len(names) == 17
    assert sorted(names[:7]) == sorted(row["id"] for row in ROWS)
    assert sorted(names[7:14]) == sorted(names[:7])
    assert names != [row.id for row in read_demonstrations(source, 17, seed=3, direct_share=0.5)]
