"""Rows as people have them, without a system's layout: plain tables in every kind of file."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from row_files import one, refused

from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.formats import read_records
from pixelis.datasets.labels import Labels
from pixelis.errors import BadInput
from pixelis.operations.image import load_image
from pixelis.records import Demonstration, Question

COLOURS = {"red": (255, 0, 0), "lime": (0, 255, 0), "blue": (0, 0, 255)}
ASKED = "Which colour has the square?"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        Image.new("RGB", (32, 32), colour).save(tmp_path / f"{name}.png")
    return tmp_path


def encoded(folder: Path, name: str) -> bytes:
    return (folder / f"{name}.png").read_bytes()


def rows_of(folder: Path, image: Callable[[str], Any] = "{}.png".format) -> list[dict[str, Any]]:
    return [{"image": image(name), "question": ASKED, "answer": name} for name in COLOURS]


def cells(rows: list[dict[str, Any]], delimiter: str) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def lines(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(folder / "rows.jsonl")


def arrow(folder: Path, path: Path, new: Callable[..., Any]) -> None:
    table = pa.Table.from_pylist(rows_of(folder, lambda name: {"bytes": encoded(folder, name), "path": None}))
    with new(str(path), table.schema) as writer:
        writer.write_table(table)


def saved(folder: Path) -> str:
    path = folder / "saved"
    path.mkdir()
    arrow(folder, path / "data-00000-of-00001.arrow", pa.ipc.new_stream)
    for name in ("state.json", "dataset_info.json"):
        (path / name).write_text("{}", encoding="utf-8")
    return str(path)


def tar(folder: Path) -> str:
    with tarfile.open(folder / "rows.tar", "w") as archive:
        for number, name in enumerate(COLOURS):
            row = {"question": ASKED, "answer": name, "image": "lost.png"}
            for ending, content in (("png", encoded(folder, name)), ("json", json.dumps(row).encode())):
                member = tarfile.TarInfo(f"train/{number:04d}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return str(folder / "rows.tar")


def openai(folder: Path) -> str:
    def row(name: str) -> dict[str, Any]:
        url = "data:image/png;base64," + base64.b64encode(encoded(folder, name)).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": ASKED}]
        return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": name}]}

    return lines(folder, *map(row, COLOURS))


def base64_table(folder: Path) -> str:
    pictures = rows_of(folder, lambda name: base64.b64encode(encoded(folder, name)).decode())
    (folder / "base64.tsv").write_text(cells(pictures, "\t"), encoding="utf-8")
    return str(folder / "base64.tsv")


def written(folder: Path, name: str) -> str:
    path, rows = folder / name, rows_of(folder)
    match path.suffix:
        case ".csv":
            path.write_text(cells(rows, ","), encoding="utf-8")
        case ".tsv":
            path.write_text(cells(rows, "\t"), encoding="utf-8")
        case ".json":
            path.write_text(json.dumps(rows), encoding="utf-8")
        case ".gz":
            path.write_bytes(gzip.compress(cells(rows, ",").encode()))
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows_of(folder, lambda name: encoded(folder, name))), path)
        case ".arrow":
            arrow(folder, path, pa.ipc.new_file)
        case _:
            return lines(folder, *rows)
    return str(path)


SOURCES: dict[str, Callable[[Path], str]] = {
    **{
        name: lambda folder, name=name: written(folder, name)
        for name in ("a.csv", "a.tsv", "a.json", "a.jsonl", "a.csv.gz", "a.parquet", "a.arrow")
    },
    "saved": saved,
    "base64": base64_table,
    "tar": tar,
    "openai": openai,
}


@pytest.mark.parametrize("kind", [Question, Demonstration])
@pytest.mark.parametrize("source", SOURCES)
def test_a_table_is_read_from_every_kind_of_file(folder: Path, source: str, kind: type[Question]) -> None:
    records = list(read_records(f"{SOURCES[source](folder)}?cache={folder / 'cache'}", kind))
    for record, (name, colour) in zip(records, COLOURS.items(), strict=True):
        assert isinstance(record, kind), record
        (media,) = record.media
        assert (record.question, record.answers) == (ASKED, [name])
        assert tuple(load_image(media.uri, 10**6, 10**6)[0, 0]) == colour
        if isinstance(record, Demonstration):
            assert [(turn.op, turn.answer) for turn in record.turns] == [(None, name)]


def test_a_spreadsheets_table_may_be_divided_by_semicolons_and_have_blank_cells(folder: Path) -> None:
    text = '\ufeffImage;Question;Answer\r\nred.png;"Which; of\nthem?";007\r\n;What is 3,5 + 1?;4,5\r\n'
    (folder / "a.csv").write_bytes(text.encode())
    one, two = (row for row in read_records(str(folder / "a.csv")) if isinstance(row, Question))
    assert (one.question, one.answers, len(one.media)) == ("Which; of\nthem?", ["007"], 1)
    assert (two.question, two.answers, two.media) == ("What is 3,5 + 1?", ["4,5"], [])


def test_a_comma_in_a_text_without_quotation_marks_is_named(folder: Path) -> None:
    (folder / "a.csv").write_text("question,answer\nWhich, then?,red\n", encoding="utf-8")
    bad = refused(str(folder / "a.csv"))
    assert (bad.row, bad.code) == ("1", "too_many_cells")


QUESTION_PARTS = [{"type": "image"}, {"type": "text", "text": ASKED}]
ANSWER_PARTS = [{"type": "text", "text": "red"}]


@pytest.mark.parametrize(
    "row",
    [
        {"image": "red.png", "prompt": ASKED, "solution": "red"},
        {"images": ["red.png"], "query": ASKED, "response": "red"},
        {"image_path": "red.png", "question": ASKED, "label": "red", "prompt": "unused"},
        {"file_name": "red.png", "Question": ASKED, "Answer": "red"},
        {"images": "['red.png']", "instruction": ASKED, "input": "", "output": "red"},
        {
            "messages": [{"role": "user", "content": f"<image>{ASKED}"}],
            "solution": "red",
            "images": ["red.png"],
        },
        {"prompt": [{"role": "user", "content": ASKED}], "answer": "red", "image": "red.png"},
        {
            "prompt": [{"role": "user", "content": QUESTION_PARTS}],
            "completion": [{"role": "assistant", "content": ANSWER_PARTS}],
            "images": ["red.png"],
        },
    ],
)
def test_common_names_of_columns_are_understood(folder: Path, row: dict[str, Any]) -> None:
    for kind in (Question, Demonstration):
        (record,) = read_records(lines(folder, row), kind)
        assert isinstance(record, kind), record
        assert (record.question, record.answers, len(record.media)) == (ASKED, ["red"], 1)


def test_columns_of_any_name_are_named_and_a_missing_one_with_those_that_exist(folder: Path) -> None:
    row = {"picture": "red.png", "asked": ASKED, "gold": "red", "photo": "blue.png"}
    source = lines(folder, row)
    with pytest.raises(BadInput, match=r"question is missing; the columns are picture, asked, gold, photo"):
        list(read_records(source))
    record = one(f"{source}?question=asked&answer=gold&image=photo")
    expected = (ASKED, ["red"], str(folder / "blue.png"))
    assert (record.question, record.answers, record.media[0].uri) == expected
    bad = refused(f"{source}?question=asked&answer=truth")
    assert (bad.column, bad.code) == ("truth", "missing_column")
    assert "picture, asked, gold, photo" in bad.message
    with pytest.raises(BadInput, match="leave out format"):
        list(read_records(f"{source}?format=r1v&answer=gold"))
    with pytest.raises(BadInput, match=r"may be solution or label: name it with \?answer=COLUMN"):
        list(read_records(lines(folder, {"question": ASKED, "solution": "red", "label": "3"})))


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ({"options": ["red", "lime", "blue"]}, "B"),
        ({"choices": ["red", "lime", "blue"]}, 1),
        ({"choices": {"label": ["1", "2", "3"], "text": ["red", "lime", "blue"]}}, "lime"),
        ({"A": "red", "B": "lime", "C": "blue", "D": None}, "B"),
    ],
)
def test_options_are_lines_of_the_question_and_the_answer_is_a_letter(
    folder: Path, columns: dict[str, Any], answer: str | int
) -> None:
    record = one(lines(folder, {"image": "lime.png", "question": ASKED, **columns, "answer": answer}))
    assert record.question == f"{ASKED}\nA. red\nB. lime\nC. blue"
    assert (record.answers, record.scorer) == (["B"], "mc_letter")
    bad = refused(lines(folder, {"question": ASKED, "options": ["red", "lime"], "answer": 2}))
    assert bad.code == "no_label"


@pytest.mark.parametrize("name", ["answer", "response", "label", "gold"])
def test_a_question_without_its_truth_does_not_depend_on_it(folder: Path, name: str) -> None:
    seen, labels = list[dict[str, Any]](), dict[str, Labels]()
    for truth in ("red", "B", None):
        row = {"question": ASKED} if truth is None else {"question": ASKED, name: truth}
        source = lines(folder, row) + ("?answer=gold" if name == "gold" else "")
        (record,) = read_records(source, on_labels=labels.__setitem__)
        assert isinstance(record, Question)
        seen.append(record.model_dump())
    assert seen[0] == seen[1] == seen[2]
    assert seen[0]["answers"] is None
    assert labels["rows-1"].answers == ["B"]


# -- chats ---------------------------------------------------------------------------------------------------


def shown(folder: Path, row: dict[str, Any]) -> list[Demonstration]:
    records = list(read_records(lines(folder, {"id": "c", "images": ["red.png", "blue.png"], **row})))
    assert all(isinstance(record, Demonstration) for record in records), records
    return [record for record in records if isinstance(record, Demonstration)]


def said_by_turns(*texts: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]


def test_each_question_of_a_chat_is_a_demonstration_with_the_earlier_ones_as_history(folder: Path) -> None:
    said = ["<image>\nWhat is it?", "A square.", "And this <image> one?", "Also."]
    turns = said_by_turns(*said, "Which colours?", "red and blue")
    first, second, third = shown(folder, {"conversations": turns})
    assert [record.id for record in (first, second, third)] == ["c.1", "c.2", "c.3"]
    expected = ("What is it?", "A square.", 1, [])
    assert (first.question, first.turns[0].answer, len(first.media), first.history) == expected
    assert second.question == "And this <image> one?"
    expected = [("What is it?", "A square.", ["img0"]), ("And this <image> one?", "Also.", ["img1"])]
    assert [(e.question, e.answer, e.media) for e in third.history] == expected
    assert [media.uri for media in third.media] == [str(folder / "red.png"), str(folder / "blue.png")]
    row = {"conversations": turns, "images": ["red.png", "blue.png"]}
    (cut,) = read_records(lines(folder, row), on_labels=lambda *_: None)
    assert isinstance(cut, Question)
    assert cut.question == "What is it?", "others show answers"


def test_query_and_response_with_a_history_are_one_question(folder: Path) -> None:
    row = {"query": "Which colours?", "response": "red and blue", "images": ["red.png"]}
    row["history"] = [["<image>What is it?", "A square."]]
    (record,) = read_records(lines(folder, row), Demonstration)
    assert isinstance(record, Demonstration)
    assert (record.question, record.turns[-1].answer) == ("Which colours?", "red and blue")
    expected = [("What is it?", "A square.", ["img0"])]
    assert [(e.question, e.answer, e.media) for e in record.history] == expected


ZOOM = {"name": "zoom_in", "arguments": {"bbox_2d": [100, 100, 800, 800]}}
CALLED = {"name": "zoom_in", "arguments": json.dumps(ZOOM["arguments"])}
CALLS: dict[str, list[dict[str, Any]]] = {
    "function_call": [
        {"from": "human", "value": "<image>What is it?"},
        {"from": "function_call", "value": json.dumps(ZOOM)},
        {"from": "observation", "value": "<image>"},
        {"from": "gpt", "value": "red"},
    ],
    "a thought, then tool_call": [
        {"role": "user", "content": "<image>What is it?"},
        {"role": "model", "content": "<think>closer</think>"},
        {"role": "tool_call", "content": json.dumps(ZOOM)},
        {"role": "tool_response", "content": "<image>"},
        {"role": "bot", "content": "<answer>red</answer>"},
    ],
    "tool_calls": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": CALLED}],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "image"}]},
        {"role": "assistant", "content": "red"},
    ],
}


@pytest.mark.parametrize("form", CALLS)
def test_calls_are_read_in_every_form(folder: Path, form: str) -> None:
    column = "conversations" if form == "function_call" else "messages"
    (record,) = shown(folder, {column: CALLS[form]})
    call, answer = record.turns
    assert (call.op, call.target, call.arguments) == ("zoom_in", "img0", {"box": [0.1, 0.1, 0.8, 0.8]})
    assert (answer.answer, record.question, len(record.media)) == ("red", "What is it?", 1)
    assert call.verbatim.images == [str(folder / "blue.png")]


@pytest.mark.parametrize("form", ["messages of their own", "fields of one message"])
def test_several_calls_of_a_turn_have_a_result_each(folder: Path, form: str) -> None:
    calls: list[dict[str, Any]] = [{"role": "tool_call", "content": json.dumps(ZOOM)}] * 2
    if form == "fields of one message":
        calls = [{"role": "assistant", "content": "", "tool_calls": [{"function": ZOOM}, {"function": ZOOM}]}]
    results = [{"role": "tool", "content": "<image>"}] * 2
    question = {"role": "user", "content": "<image>What is it?"}
    answer = {"role": "assistant", "content": "red"}
    images = ["red.png", "blue.png", "lime.png"]
    (record,) = shown(folder, {"messages": [question, *calls, *results, answer], "images": images})
    call, last = record.turns
    assert (call.op, [further.op for further in call.further], last.answer) == ("zoom_in", ["zoom_in"], "red")


ASK = {"role": "user", "content": "x"}
BROWSE = {"name": "browse", "arguments": {}}


@pytest.mark.parametrize(
    ("messages", "column", "code"),
    [
        ([{"role": "narrator", "content": "x"}], "messages.0.role", "unknown_role"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages.0.content", "unknown_part"),
        ([{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}], "messages", "out_of_turn"),
        ([{"role": "user", "content": "<image> <image> <image>?"}], "messages", "media_count"),
        ([{"role": "user", "content": "What?"}], "messages", "no_answer"),
        ([ASK, {"role": "tool_call", "content": json.dumps(BROWSE)}], "messages.1", "unknown_op"),
        ([{"role": "tool_call", "content": "[1]"}], "messages.0", "wrong_type"),
        ([{"role": "assistant", "content": "", "tool_calls": ["zoom_in"]}], "messages.0", "wrong_type"),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], "tool_calls", "wrong_type"),
    ],
)
def test_a_message_that_cannot_be_meant_is_named(
    folder: Path, messages: list[dict[str, Any]], column: str, code: str
) -> None:
    bad = refused(lines(folder, {"messages": messages, "images": ["red.png", "blue.png"]}))
    assert (bad.column, bad.code) == (column, code)


def test_media_without_marks_of_their_kind_come_first(folder: Path) -> None:
    row = {"question": "Is <image> in it?", "answer": "yes", "image": "red.png"}
    row["video"] = [["lime.png", "blue.png"]]
    record = one(lines(folder, row))
    assert [media.id for media in record.media] == ["vid0", "img0"]
    assert record.question == "Is <image> in it?"


def test_marks_of_another_number_than_the_media_are_refused_in_every_layout(folder: Path) -> None:
    media = [{"id": "img0", "uri": "red.png"}, {"id": "img1", "uri": "blue.png"}]
    earlier = {"history": [{"question": "What is <image><image>?", "answer": "red", "media": ["img0"]}]}
    rows = [
        {"id": "a", "question": "Is <image> red?", "media": media},
        {"id": "b", "question": "Is it red?", "media": media, **earlier},
        {"id": "c", "question": "What do <video> and <image> mean in HTML?"},
    ]
    *bad, third = read_records(lines(folder, *rows))
    expected = [("a", "question", "media_count"), ("b", "history.0.question", "media_count")]
    assert [(row.id, row.column, row.code) for row in bad if isinstance(row, BadRow)] == expected
    assert isinstance(third, Question)
    row = {"images": ["red.png", "blue.png"], "question": "Is <image> red?", "answer": "yes"}
    assert refused(lines(folder, row)).code == "media_count"


def test_answers_without_tags_are_written_by_the_dialect_where_a_history_shows_them_so(folder: Path) -> None:
    turns = said_by_turns("What?", "A square.", "And?", "red")
    several = shown(folder, {"conversations": turns, "images": []})
    assert [turn.verbatim for record in several for turn in record.turns] == [None, None]
    (single,) = shown(folder, {"conversations": turns[:2], "images": []})
    assert single.turns[0].verbatim is not None
