"""Rows of the seed systems in their official schemas become the same kind of record."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs
from row_files import one, refused, write

from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats import FORMATS, detect, read_records
from pixelis.datasets.media_root import MediaRoot
from pixelis.errors import BadInput
from pixelis.operations.image import load_image
from pixelis.records import Demonstration, Question


def test_parquet_rows_with_pictures_in_them_become_files_once(folder: Path) -> None:
    picture = {"bytes": (folder / "images/1.png").read_bytes(), "path": None}
    asked = [{"role": "system", "content": "Tools"}, {"role": "user", "content": "<image>\nWhat?"}]
    deepeyes = {"data_source": "vstar", "prompt": asked, "images": [picture], "ability": "vl"}
    deepeyes |= {"reward_model": {"ground_truth": "red", "style": "model"}, "env_name": "visual_toolbox_v2"}
    deepeyes["extra_info"] = {"index": "12", "split": "train", "tool": True}
    r1v = {"image": picture, "problem": "How many?", "solution": "<answer> 3 </answer>"}
    cache = folder / "cache"
    for name, row, truth in (("deepeyes", deepeyes, "red"), ("r1v", r1v, "3")):
        question = one(write(folder, row, name="rows.parquet") + f"?cache={cache}")
        assert detect(row) == name
        assert question.answers == [truth]
        assert load_image(question.media[0].uri, 10**6, 10**6)[0, 0, 0] == 60
    assert sum(path.is_file() for path in cache.rglob("*")) == 1
    question = one(write(folder, deepeyes, name="rows.parquet") + f"?cache={cache}")
    assert (question.id, question.scorer, question.task) == ("vstar-12", "judge", "vstar")
    assert question.meta["system"] == "Tools"
    assert question.meta["env_name"] == "visual_toolbox_v2"


def test_data_urls_become_files_too(folder: Path) -> None:
    content = (folder / "images/1.png").read_bytes()
    url = "DATA:image/png;base64," + base64.b64encode(content).decode()
    clip = {"id": "vid0", "kind": "video", "frames": [url, url]}
    row = {"id": "q", "question": "What?", "media": [{"id": "img0", "uri": url}, clip]}
    question = one(write(folder, row) + f"?cache={folder / 'cache'}")
    picture, frames = question.media
    assert (Path(picture.uri).read_bytes(), frames.frames) == (content, [picture.uri, picture.uri])
    for broken in ("data:image/png;base64,@", "data:image/png,text", "data:image/png;base64,"):
        media = [{"id": "img0", "uri": broken}]
        bad = refused(write(folder, {"id": "q", "question": "?", "media": media}))
        assert (bad.column, bad.code) == ("media.0.uri", "bad_media")


def test_a_list_of_frames_is_a_clip_and_a_letter_is_a_choice(folder: Path) -> None:
    row = {"qid": "q", "question": "Which?", "answer": "B", "is_video": True}
    row["image"] = ["images/0.png", "images/1.png"]
    question = one(write(folder, row))
    (clip,) = question.media
    assert (clip.id, clip.kind, len(clip.frames or [])) == ("vid0", "video", 2)
    assert question.scorer == "mc_letter"
    assert one(write(folder, row) + "?scorer=judge").scorer == "judge"
    clips = {"problem": "<video> Which?", "answer": "B", "videos": ["images/0.png"]}
    assert [media.id for media in one(write(folder, clips)).media] == ["vid0"]


CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'


STEPS: dict[str, list[dict[str, Any]]] = {
    "generator": [
        {"action": "THINK", "parameters": {}, "thought": "Look."},
        {"action": "ZOOM_IN", "parameters": {"region": [40, 0, 80, 40]}, "result": {}},
        {"action": "ANSWER", "parameters": {"answer": "red"}},
    ],
    "engine": [
        {"type": "reasoning", "operation": "THINK", "arguments": {"text": "Look."}},
        {"type": "visual_operation", "operation": "ZOOM_IN", "arguments": {"region": [0.5, 0.0, 1.0, 1.0]}},
        {"type": "answer", "operation": "FINAL_ANSWER", "arguments": {"answer": "red"}},
    ],
    "documents": [
        {"type": "reasoning", "content": "Look."},
        {"type": "visual_operation", "name": "ZOOM_IN", "parameters": {"bbox": [40, 0, 80, 40]}},
        {"type": "answer", "name": "ANSWER", "parameters": {"text": "red"}},
    ],
}
OLD = {"task_type": "counting", "sample_type": "positive", "question": "What?", "answer": "red"}
OLD |= {"image_path": "images/0.png", "sampling_weight": 1.5}
OLD["provenance"] = {"source_dataset": "coco", "original_sample_id": "9"}
CHAIN = {**OLD, "id": "cota_1", "chain_of_thought": [{"thought": "Look.", "type": "analysis"}]}
CHAIN["visual_operations"] = [{"operation": "ZOOM_IN", "params": {"region": [40, 0, 80, 40]}, "output": {}}]


@pytest.mark.parametrize(
    "row", [*({**OLD, "sample_id": "cota_1", "trajectory": steps} for steps in STEPS.values()), CHAIN]
)
def test_the_four_layouts_of_the_published_pixelis_say_the_same(folder: Path, row: dict) -> None:
    shown = one(write(folder, row))
    assert isinstance(shown, Demonstration)
    zoom, answer = shown.turns
    assert (zoom.op, zoom.think, zoom.arguments) == ("zoom_in", "Look.", {"box": [0.5, 0.0, 1.0, 1.0]})
    assert (answer.answer, shown.id, shown.weight, shown.kind) == ("red", "cota_1", 1.5, "golden")
    assert (shown.provenance.source, shown.provenance.original_id) == ("coco", "9")


# -- what is wrong with rows ---------------------------------------------------------------------------------


def base(**changes: Any) -> dict[str, Any]:
    row = {"images": ["images/0.png"], "doc_id": "d1", "problem": "<image>\nWhat?", "solution": "red"}
    return {**row, "data_source": "visual_probe_train", **changes}


@pytest.mark.parametrize(
    ("row", "column", "code"),
    [
        (base(problem=5), "problem", "wrong_type"),
        (base(problem=" "), "problem", "empty"),
        (base(solution=None), "solution", "no_label"),
        (base(solution=[{}]), "solution", "wrong_type"),
        (base(images=["images/9.png"]), "images", "media_not_found"),
        (base(images=["../../etc/passwd"]), "images", "media_traversal"),
        (base(images=["images/../../x.png"]), "images", "media_traversal"),
        (base(images=["http://host/x.png"]), "images", "media_scheme"),
        (base(images=["file:///etc/passwd"]), "images", "media_scheme"),
        (base(images=["a\0b"]), "images", "media_traversal"),
        (base(images=[7]), "images", "media_type"),
        (base(images=[None]), "images", "no_media"),
        (base(images=[]), "problem", "media_count"),
        (base(problem="<image><image>"), "problem", "media_count"),
        (base(doc_id=1.5), "doc_id", "wrong_type"),
        (base(problem="half a \ud800 character"), "all", "unicode"),
        (base(doc_id="twice"), "id", "duplicate_id"),
        ({"doc_id": "x", "problem": "?"}, "solution", "missing_column"),
    ],
)
def test_a_bad_row_is_a_value_that_names_its_place_and_the_rows_around_it_are_read(
    folder: Path, row: dict, column: str, code: str
) -> None:
    before, after = base(doc_id="twice"), base(doc_id="ünïcödé", problem="<image>数字? 🙂")
    records = list(read_records(write(folder, before, row, after)))
    assert isinstance(records[0], Question)
    assert isinstance(records[2], Question)
    assert (records[2].id, records[2].question) == ("ünïcödé", "数字? 🙂")
    bad = records[1]
    assert isinstance(bad, BadRow), bad
    assert (Path(bad.file).name, bad.row, bad.column, bad.code) == ("rows.jsonl", "2", column, code)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (["<think>t</think>nothing"], None),
        (["<answer>x</answer>", "<image>", CALL.format("image_zoom_in_tool", "{}")], "empty"),
        ([CALL.format("fly", "{}")], "unknown_op"),
        (["idle", "<image>", "<answer>x</answer>"], "empty"),
        ([CALL.format("fly", "{}"), "<image>", "<answer>x</answer>"], "unknown_op"),
        ([CALL.format("fly", "{}"), "Error: no such tool", "<answer>x</answer>"], None),
        (["<answer>x</answer>", "And what else?"], "no_answer"),
        ([CALL.format("image_zoom_in_tool", '{"bbox_2d":[0,0,40,40]}')], "no_answer"),
    ],
)
def test_a_chat_that_is_no_demonstration_is_a_bad_row(
    folder: Path, said: list[str], code: str | None
) -> None:
    chat = [{"role": ("assistant", "user")[i % 2], "content": text} for i, text in enumerate(said)]
    images = ["images/0.png"] * (1 + sum("<image>" in text for text in said))
    row = {"messages": [{"role": "user", "content": "<image>What?"}, *chat], "images": images}
    (record,) = read_records(write(folder, row))
    assert (record.code if isinstance(record, BadRow) else None) == code


def test_columns_of_no_format_and_of_two_are_errors_that_list_the_formats(folder: Path) -> None:
    for row in ({"text": "x"}, {"messages": [], "qid": "a", "question": "b", "answer": "c"}):
        with pytest.raises(BadInput) as caught:
            list(read_records(write(folder, row)))
        assert caught.value.code == "unknown_format"
        assert all(name in (caught.value.fix or "") for name in FORMATS)
        assert "row 1" in caught.value.message
    with pytest.raises(BadInput, match="no format"):
        list(read_records(write(folder, base()) + "?format=deepeye"))


def test_media_are_relative_to_the_files_or_to_the_folder_that_the_source_names(folder: Path) -> None:
    row = base(images=["0.png"])
    assert isinstance(next(read_records(write(folder, row))), BadRow)
    for media in ("images", str(folder / "images"), f"file://{folder}/images"):
        question = next(read_records(write(folder, row) + f"?media={media}"))
        assert isinstance(question, Question)
        assert question.media[0].uri == str(folder / "images" / "0.png")


def test_media_on_another_filesystem_are_fetched_once(tmp_path: Path) -> None:
    bucket = fs._MockFileSystem()
    bucket.create_dir("bucket/images")
    with bucket.open_output_stream("bucket/images/0.png") as out:
        out.write(b"a picture")
    root = MediaRoot(bucket, "bucket/images", str(tmp_path))
    uri = root.reference("images", "0.png")
    assert Path(uri).read_bytes() == b"a picture"
    bucket.delete_file("bucket/images/0.png")
    assert root.reference("images", "0.png") == uri
    refusals = {"1.png": "media_not_found", ".": "media_not_found", "../images2/0.png": "media_traversal"}
    for reference, code in refusals.items():
        with pytest.raises(RowError) as caught:
            root.reference("images", reference)
        assert caught.value.code == code
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [Path(uri)]


@pytest.mark.parametrize(
    "written",
    [["<answer> </answer>", "cat", " "], "cat", ["", "<answer>dog</answer>, no: <answer> cat </answer>"]],
)
def test_an_answer_says_something(folder: Path, written: Any) -> None:
    assert one(write(folder, {"problem": "What?", "answer": written})).answers == ["cat"]


def test_annotated_places_are_shares_of_the_picture(folder: Path) -> None:
    def told(**annotations: Any) -> dict[str, Any]:
        return {"id": str(annotations), "question": "", "annotations": annotations}

    shares, pixels = [0.0, 0.5, 1.0, 1.0], [0, 20, 80, 40]
    wrong = [told(regions=[{"id": "r0", "label": "cup", "box": pixels}])]
    wrong += [told(lines=[{"text": "a", "box": shares}, {"text": "b", "box": [-0.1, 0, 1, 1]}])]
    right = told(regions=[{"id": "r0", "label": "cup", "box": shares}], lines=[{"text": "a"}])
    *bad, good = read_records(write(folder, *wrong, right))
    columns = [(row.column, row.code) for row in bad if isinstance(row, BadRow)]
    places = ["annotations.regions.0.box", "annotations.lines.1.box"]
    assert columns == [(place, "out_of_range") for place in places]
    assert isinstance(good, Question)


@pytest.mark.parametrize(
    ("own", "scorer"), [("TRANCE_3", "func_seq"), ("entrance_3", "math"), ("clevr-trance-3", "func_seq")]
)
def test_chained_functions_are_recognised_by_the_id(folder: Path, own: str, scorer: str) -> None:
    assert one(write(folder, {"id": own, "problem": "What?", "answer": "shape(1, cube)"})).scorer == scorer


def test_a_row_without_turns_is_no_demonstration(folder: Path) -> None:
    row = refused(write(folder, {"id": "q", "question": "What?", "answers": ["red"]}), Demonstration)
    assert (row.code, row.id) == ("no_turns", "q")
