"""MMMU, ScienceQA, MM-Vet, GeoQA and ViRL39K: tiny files in each official schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_server import ChatServer
from test_readers import only, png, put, read

from pixelis.config import parse
from pixelis.datasets.questions import read_rows
from pixelis.errors import BadInput, MissingFile
from pixelis.jobs.evaluate import inputs
from pixelis.records import Question
from pixelis.rewards.mmmu import chosen_option, list_text, mmmu_open
from pixelis.rewards.scorers import case_of, find_scorer
from pixelis.rewards.services import Services


def mmmu(number: int, subject: str = "Art_Theory", **changes: Any) -> dict[str, Any]:
    row = {
        "id": f"validation_{subject}_{number}",
        "question": "What is in <image 1>?",
        "options": "['a cat', \"a dog's\"]",
    }
    row |= {f"image_{i}": None for i in range(1, 8)}
    row |= {
        "image_1": {"bytes": png(20, 10), "path": "1.png"},
        "answer": "B",
        "question_type": "multiple-choice",
    }
    return row | {"topic_difficulty": "Easy", "explanation": ""} | changes


def table(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([(name, picture if name.startswith("image_") else pa.string()) for name in rows[0]])
    pq.write_table(pa.Table.from_pylist(rows, schema), path)


@pytest.mark.slow
def test_mmmu(tmp_path: Path) -> None:
    second = {"image_2": {"bytes": png(30, 10), "path": "2.png"}}
    rows = [
        mmmu(1),
        mmmu(2, **second, question="Compare them.", options="['<image 2>', '<image 1>']", answer="A"),
        mmmu(3, **second),
        mmmu(4, options="[]", answer="['24/7', '3.429']", question_type="open"),
        mmmu(5, options="[]", answer="?", question_type="open"),
        mmmu(6, answer="C"),
        mmmu(7, options="__import__('os')"),
        mmmu(8, image_1=None),
        mmmu(1),
    ]
    table(tmp_path / "Art_Theory/validation-00000-of-00001.parquet", rows)
    table(tmp_path / "Math/validation-00000-of-00001.parquet", [mmmu(1, "Math")])
    questions, bad = read(f"mmmu:{tmp_path}?cache={tmp_path / 'cache'}")
    one, two, three, opened, hidden, other = questions
    expected = ("What is in <image>?\nA. a cat\nB. a dog's", ["B"], "mmmu_choice")
    assert (one.question, one.answers, one.scorer) == expected
    assert one.meta["category"] == ["Art and Design", "Art_Theory"]
    assert two.question == "Compare them.\nA. <image>\nB. <image>", (
        "each picture is shown in the place of its option"
    )
    assert [Path(media.uri).read_bytes() for media in two.media] == [png(30, 10), png(20, 10)]
    assert three.question.startswith("What is in <image 1>?"), (
        "the second picture has no place, so both come first"
    )
    assert [Path(media.uri).read_bytes() for media in three.media] == [png(20, 10), png(30, 10)]
    expected = (["24/7", "3.429"], "mmmu_open", "What is in <image>?")
    assert (opened.answers, opened.scorer, opened.question) == expected
    assert hidden.answers is None
    assert (other.id, other.meta["category"]) == ("mmmu-validation-validation_Math_1", ["Science", "Math"])
    assert [row.code for row in bad] == ["no_label", "wrong_type", "no_media", "duplicate_id"]
    with pytest.raises(BadInput, match="no subject 'Maths'"):
        read(f"mmmu:{tmp_path}?subject=Maths")
    with pytest.raises(MissingFile):
        read(f"mmmu:{tmp_path}?split=test")
    table(tmp_path / "merged/data/validation-00000-of-00001.parquet", [mmmu(1), mmmu(1, "Math")])
    assert [q.meta["original_id"] for q in read(f"mmmu:{tmp_path}/merged?cache={tmp_path / 'cache'}")[0]] == [
        "validation_Art_Theory_1",
        "validation_Math_1",
    ]
    chosen = only(f"mmmu:{tmp_path}/merged?subject=Math&cache={tmp_path / 'cache'}")
    assert chosen.meta["original_id"] == "validation_Math_1"


def test_choices_are_read_by_mmmus_rules() -> None:
    options = ["Seurat", "Claude Monet", "$7.50"]
    expected = {
        "(A) or rather (B).": "B",
        "A B ": "B",
        "It was painted by Claude Monet in 1875.": "B",
        "Not Seurat but, as far as I can see, Claude Monet.": "B",
        "Claude Monet": None,
        "The costs are $7.50 for each of them.": "C",
        "I do not know anything about this picture.": None,
        "": None,
    }
    assert {text: chosen_option(text, options) for text in expected} == expected
    question = Question(
        id="q", question="Who?", answers=["B"], scorer="mmmu_choice", meta={"options": options}
    )
    services = Services(parse({}).rewards)
    score = find_scorer("mmmu_choice")
    answers = [
        "It was painted by Claude Monet in 1875.", "Claude Monet", "B. Claude Monet", "b", "A", "no idea",
        None,
    ]  # fmt: skip
    assert [score(case_of(question, answer, ["B"]), services) for answer in answers] == [1.0] * 4 + [0.0] * 3
    services.close()


def test_open_answers_are_compared_by_mmmus_rules() -> None:
    right = [
        ("The resistance is 3.43 ohm.", ["3.429"]),
        ("R = 12/3.5 = 3.429", ["24/7", "3.429"]),
        ("24/7", ["24/7", "3.429"]),
        ("So the answer is Congruity Theory", ["congruity theory"]),
        ("The total is 1,234 dollars", ["1234"]),
        ("1.2e3", ["1200"]),
        ("x is 5\nso y is 7", ["5"]),
        ("It is a b c", ["b"]),
        ("B", ["b"]),
    ]
    wrong = [
        ("The resistance is 3.44 ohm.", ["3.429"]),
        ("It is about", ["o"]),
        ("", ["5"]),
        (None, ["5"]),
        ("The answer is 15", ["5"]),
    ]
    assert [mmmu_open(answer, truths) for answer, truths in right] == [1.0] * len(right)
    assert [mmmu_open(answer, truths) for answer, truths in wrong] == [0.0] * len(wrong)
    assert list_text("['a', 2]") == ["a", "2"]
    assert [list_text(text) for text in ("open('x')", "{'a': 1}", "[", "[" * 5000)] == [None] * 4


def problem(**changes: Any) -> dict[str, Any]:
    row = {
        "question": "Which?",
        "choices": ["red", "blue", "green"],
        "answer": 1,
        "hint": "",
        "image": None,
        "task": "closed choice",
    }
    row |= {"grade": "grade6", "subject": "natural science", "topic": "physics", "skill": "s", "lecture": "l"}
    return row | {"split": "test"} | changes


def test_scienceqa(tmp_path: Path) -> None:
    problems = {
        "1": problem(),
        "2": problem(image="image.png", hint="Look.", grade="grade7", subject="social science", answer=0),
        "3": problem(answer=3),
        "4": problem(image="../../image.png"),
        "5": problem(split="train"),
    }
    put(tmp_path, "problems.json", problems)
    put(tmp_path, "pid_splits.json", {"train": ["5"], "test": ["1", "2", "3", "4", "9"], "minitest": ["2"]})
    (tmp_path / "images/test/2").mkdir(parents=True)
    (tmp_path / "images/test/2/image.png").write_bytes(png(8, 8))
    (plain, shown), bad = read(f"scienceqa:{tmp_path}")
    expected = ("scienceqa-test-1", "Which?\nA. red\nB. blue\nC. green", [])
    assert (plain.id, plain.question, plain.media) == expected
    expected = (["B"], "mc_letter", ["NAT", "NO", "G1-6"])
    assert (plain.answers, plain.scorer, plain.meta["category"]) == expected
    assert shown.question.startswith("Context: Look.\nWhich?\nA. red")
    assert (shown.answers, shown.meta["category"]) == (["A"], ["SOC", "TXT", "IMG", "G7-12"])
    assert shown.media[0].uri == str(tmp_path / "images/test/2/image.png")
    expected = [("3", "no_label"), ("4", "media_traversal"), ("9", "missing_column")]
    assert [(row.row, row.code) for row in bad] == expected
    assert only(f"scienceqa:{tmp_path}?split=minitest").media[0].uri.endswith("test/2/image.png")
    with pytest.raises(BadInput, match="no split 'dev'"):
        read(f"scienceqa:{tmp_path}?split=dev")


@pytest.mark.slow
def test_mmvet_is_graded_in_tenths_by_a_judge_and_refused_without_one(tmp_path: Path) -> None:
    row = {
        "imagename": "v1_0.png",
        "question": "What is x?",
        "answer": "-1<AND>-5",
        "capability": ["ocr", "math"],
    }
    put(tmp_path, "mm-vet.json", {"v1_0": row, "v1_1": {**row, "answer": ""}})
    put(tmp_path, "images", None)
    (question,), bad = read(f"mmvet:{tmp_path}")
    assert (question.id, question.answers, question.scorer) == ("mmvet-v1_0", ["-1<AND>-5"], "mm_vet")
    expected = (["math", "ocr"], str(tmp_path / "images/v1_0.png"))
    assert (question.meta["category"], question.media[0].uri) == expected
    assert [(row.row, row.column) for row in bad] == [("v1_1", "answer")]

    server = ChatServer(
        '{"score": 0.45, "why": "between"}', '{"score": 0.5, "why": "one of two"}', '{"score": 1, "why": ""}'
    )
    judge = {"url": server.url, "model": "m", "api_key_env": ""}
    services = Services(parse({"rewards": {"judge": judge}}).rewards)
    grade = find_scorer("mm_vet")
    assert grade(case_of(question, "x = -1", question.answers or []), services) == 0.5, (
        "no tenth is asked for again"
    )
    assert grade(case_of(question, "-1 and -5", question.answers or []), services) == 1.0
    assert grade(case_of(question, None, question.answers or []), services) == 0.0
    assert len(server.requests) == 3
    asked = json.loads(server.requests[-1]["messages"][1]["content"])
    assert asked == {"question": "What is x?", "accepted": ["-1<AND>-5"], "student": "-1 and -5"}
    services.close()
    server.close()

    put(tmp_path, "mm-vet.json", {"v1_0": row})
    config = parse({"data": {"evaluate": f"mmvet:{tmp_path}", "probe_rows": 0}})
    services = Services(config.rewards)
    with pytest.raises(BadInput) as error:
        grade(case_of(question, "x = -1", question.answers or []), services)
    assert error.value.code == "no_judge"
    services.close()
    (check,) = [read for key, _, read in inputs(config) if key == "data.evaluate"]
    with pytest.raises(BadInput, match="needs a judge"):
        check(config.data.evaluate)


def test_geoqa_and_virl39k_are_read_as_files_of_rows(tmp_path: Path) -> None:
    (tmp_path / "images/test").mkdir(parents=True)
    (tmp_path / "images/test/0.png").write_bytes(png(8, 8))
    picture = tmp_path / "data/Geo170K/images/test/0.png"
    picture.parent.mkdir(parents=True)
    picture.write_bytes(png(8, 8))
    row = {"image_path": "./Geo170K/images/test/0.png", "question": "Find angle x.", "ground_truth": "145"}
    put(tmp_path, "prompts/geoqa_test_prompts.jsonl", json.dumps(row))
    for media in ("../data", tmp_path / "data"):
        (geo,) = read_rows(f"{tmp_path}/prompts/geoqa_test_prompts.jsonl?media={media}")
        assert isinstance(geo, Question)
        assert (geo.question, geo.answers, geo.scorer) == ("Find angle x.", ["145"], "math")
        assert geo.media[0].uri == str(picture)
    inside = {
        "image": {"bytes": png(8, 8), "path": None},
        "problem": "Find x.",
        "solution": "<answer> 145° </answer>",
    }
    pq.write_table(pa.Table.from_pylist([inside]), tmp_path / "train-00000-of-00001.parquet")
    (train,) = read_rows(f"{tmp_path}/train-00000-of-00001.parquet?cache={tmp_path / 'cache'}")
    assert isinstance(train, Question)
    assert (train.answers, train.scorer) == (["145°"], "math")
    virl = {
        "question": "<image>Which?",
        "answer": "\\boxed{A}",
        "PassRate_32BTrained": 0.5,
        "PassRate_7BBase": 0.25,
    }
    virl |= {
        "category": "Spatial Reasoning",
        "source": "s",
        "qid": "Processed-1-0",
        "image": ["images/test/0.png"],
    }
    pq.write_table(pa.Table.from_pylist([virl]), tmp_path / "39Krelease.parquet")
    (question,) = read_rows(f"{tmp_path}/39Krelease.parquet")
    assert isinstance(question, Question)
    assert (question.id, question.answers, question.question) == ("Processed-1-0", ["A"], "Which?")
    assert (question.meta["category"], question.meta["PassRate_7BBase"]) == ("Spatial Reasoning", 0.25)
