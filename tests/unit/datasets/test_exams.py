"""MMMU, ScienceQA, MM-Vet, GeoQA and ViRL39K: tiny files in each official schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_server import ChatServer
from official_sets import SETS, mmmu_row, mmmu_table, parquet, png, write
from test_readers import only, read

from pixelis.config import parse
from pixelis.errors import BadInput, MissingFile
from pixelis.jobs.evaluate import inputs
from pixelis.records import Question
from pixelis.rewards.mmmu import chosen_option, list_text, mmmu_open
from pixelis.rewards.scorers import case_of, find_scorer
from pixelis.rewards.services import Services


def test_subjects_and_splits_of_mmmu(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no subject 'Maths'"):
        read(f"{SETS['mmmu'].write(tmp_path)}&subject=Maths")
    with pytest.raises(MissingFile):
        read(f"mmmu:{tmp_path}?split=test")
    merged = mmmu_table(mmmu_row(1), mmmu_row(1, "Math"))
    write(tmp_path, {"merged/data/validation-00000-of-00001.parquet": merged})
    source = f"mmmu:{tmp_path}/merged?cache={tmp_path / 'cache'}"
    names = ["validation_Art_Theory_1", "validation_Math_1"]
    assert [question.meta["original_id"] for question in read(source)[0]] == names
    assert only(f"{source}&subject=Math").meta["original_id"] == names[1]


def test_splits_of_scienceqa(tmp_path: Path) -> None:
    source = SETS["scienceqa"].write(tmp_path)
    assert only(f"{source}split=minitest").media[0].uri.endswith("test/2/image.png")
    with pytest.raises(BadInput, match="no split 'dev'"):
        read(f"{source}split=dev")


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


@pytest.mark.slow
def test_mmvet_is_graded_in_tenths_by_a_judge_and_refused_without_one(tmp_path: Path, opened) -> None:
    source = SETS["mmvet"].write(tmp_path)
    question = read(source)[0][0]
    verdicts = [(0.45, "between"), (0.5, "one of two"), (1, "")]
    server = opened(ChatServer(*(json.dumps({"score": score, "why": why}) for score, why in verdicts)))
    judge = {"url": server.url, "model": "m", "api_key_env": ""}
    services = opened(Services(parse({"rewards": {"judge": judge}}).rewards))

    def grade(answer: str | None, services: Services) -> float:
        return find_scorer("mm_vet")(case_of(question, answer, question.answers or []), services)

    assert grade("x = -1", services) == 0.5, "no tenth is asked for again"
    assert grade("-1 and -5", services) == 1.0
    assert grade(None, services) == 0.0
    assert len(server.requests) == 3
    asked = json.loads(server.requests[-1]["messages"][1]["content"])
    assert asked == {"question": "What is x?", "accepted": ["-1<AND>-5"], "student": "-1 and -5"}

    rows = json.loads((tmp_path / "mm-vet.json").read_text())
    write(tmp_path, {"mm-vet.json": {"v1_0": rows["v1_0"]}})
    config = parse({"data": {"evaluate": source, "probe_rows": 0}})
    with pytest.raises(BadInput) as error:
        grade("x = -1", opened(Services(config.rewards)))
    assert error.value.code == "no_judge"
    (check,) = [read for key, _, read in inputs(config) if key == "data.evaluate"]
    with pytest.raises(BadInput, match="needs a judge"):
        check(config.data.evaluate)


def test_geoqa_and_virl39k_are_read_as_files_of_rows(tmp_path: Path) -> None:
    row = {"image_path": "./Geo170K/images/test/0.png", "question": "Find angle x.", "ground_truth": "145"}
    inside = {
        "image": {"bytes": png(8, 8), "path": None},
        "problem": "x?",
        "solution": "<answer> 145° </answer>",
    }
    virl = {"question": "<image>Which?", "answer": "\\boxed{A}", "PassRate_7BBase": 0.25, "source": "s"}
    virl |= {"category": "Spatial Reasoning", "qid": "Processed-1-0", "image": ["images/test/0.png"]}
    files = {
        "data/Geo170K/images/test/0.png": png(8, 8),
        "images/test/0.png": png(8, 8),
        "prompts/geoqa_test_prompts.jsonl": json.dumps(row),
        "train-00000-of-00001.parquet": parquet([inside]),
        "39Krelease.parquet": parquet([virl]),
    }
    write(tmp_path, files)
    for media in ("../data", tmp_path / "data"):
        geo = only(f"{tmp_path}/prompts/geoqa_test_prompts.jsonl?media={media}")
        assert (geo.question, geo.answers, geo.scorer) == ("Find angle x.", ["145"], "math")
        assert geo.media[0].uri == str(tmp_path / "data/Geo170K/images/test/0.png")
    train = only(f"{tmp_path}/train-00000-of-00001.parquet?cache={tmp_path / 'cache'}")
    assert (train.answers, train.scorer) == (["145°"], "math")
    question = only(f"{tmp_path}/39Krelease.parquet")
    assert (question.id, question.answers, question.question) == ("Processed-1-0", ["A"], "Which?")
    assert (question.meta["category"], question.meta["PassRate_7BBase"]) == ("Spatial Reasoning", 0.25)
