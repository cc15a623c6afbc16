"""`evaluate.published`: published figures beside ours, in pairs where their scores are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Command

from pixelis.config import published
from pixelis.errors import BadConfig, MissingFile
from pixelis.evaluation.published import compare_published, lines

FILE = """
model = "Qwen2-VL-2B"
[[figures]]
name = "Counting"
base = 20
published = 60
source = "paper"
scores = "theirs/scores-theirs.jsonl"
[[figures]]
name = "Counting, votes"
metric = "maj@8"
published = 62.5
source = "paper"
[[figures]]
name = "V*"
set = "vstar"
published = 95
source = "paper"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "figures.toml"
    path.write_text(FILE)
    return path


def evaluation(pixelis: Command, folder: Path, name: str, right: int, *more: str) -> tuple[int, str, str]:
    """Score answers of which the first ``right`` of ten are right, in ``folder``/``name``."""
    questions, answers = folder / "questions.jsonl", folder / f"{name}.json"
    rows = [{"id": f"q{i}", "question": "How many?", "answers": ["7"]} for i in range(10)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers.write_text(json.dumps({f"q{i}": "7" if i < right else "8" for i in range(10)}))
    keys = (f"data.evaluate={questions}", f"evaluate.answers={answers}", f"run.dir={folder / name}")
    return pixelis("evaluate", *keys, *more)


@pytest.mark.slow
def test_ours_beside_theirs_with_the_interval_and_in_pairs(
    tmp_path: Path, file: Path, pixelis: Command
) -> None:
    assert evaluation(pixelis, tmp_path, "theirs", 6)[0] == 0
    code, out, err = evaluation(pixelis, tmp_path, "ours", 9, f"evaluate.published={file}")
    assert code == 0, err
    result = json.loads((tmp_path / "ours/evaluation.json").read_text())
    (row,) = result["published"]["figures"]
    assert (row["set"], row["base"], row["published"], row["ours"]) == ("ours", 0.2, 0.6, 0.9)
    assert row["ci95"] == result["ci95"]
    assert row["inside"] is (result["ci95"][0] <= 0.6)
    assert row["difference"] == pytest.approx(0.3)
    assert (row["paired"]["mean"], row["paired"]["n"], row["paired"]["p"]) == (pytest.approx(0.3), 10, 0.25)
    assert "Counting    ours  accuracy  20.0  60.0       90.0 [59.6, 98.2]  +30.0       inside" in out
    assert "p 0.25 on 10 questions" in out
    assert "not evaluated: Counting, votes (maj@8 on a single set)" in out
    assert "not evaluated: V* (accuracy on set vstar)" in out
    assert len(result["published"]["missing"]) == 2


SUMMARY: dict[str, Any] = {
    "name": "a",
    "accuracy": 0.5,
    "ci95": [0.4, 0.6],
    "n": 40,
    "k": 4,
    "avg@k": 0.5,
    "pass@k": 0.8,
    "ci95@k": {"avg@k": [0.4, 0.6], "pass@k": [0.7, 0.9]},
    "categories": {
        "hard": {"accuracy": 0.3, "ci95": [0.1, 0.5], "n": 10},
        "none": {"accuracy": None, "ci95": None, "n": 0},
    },
}


@pytest.mark.parametrize(
    ("keys", "ours", "inside"),
    [
        ({"set": "a"}, 0.5, True),
        ({"set": "a", "metric": "avg@4"}, 0.5, True),
        ({"set": "a", "metric": "pass@4"}, 0.8, False),
        ({"set": "a", "category": "hard"}, 0.3, True),
        ({"set": "a", "metric": "pass@8"}, None, False),
        ({"set": "a", "category": "none"}, None, False),
        ({"set": "a", "category": "other"}, None, False),
        ({"set": "c"}, None, False),
        ({}, None, False),
    ],
)
def test_a_figure_is_found_by_set_category_and_metric_or_named(
    keys: dict[str, str], ours: float | None, inside: bool
) -> None:
    values = {"model": "m", "figures": [{"name": "f", "published": 45, "source": "paper", **keys}]}
    figures = published.PublishedFigures.model_validate(values)
    result = compare_published(figures, [SUMMARY, {**SUMMARY, "name": "b"}], lambda *_: None)
    assert [(row["ours"], row["inside"]) for row in result["figures"]] == (
        [] if ours is None else [(ours, inside)]
    )
    assert len(result["missing"]) == (ours is None)
    assert any("not evaluated: f" in line for line in lines(result)) is (ours is None)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("base = 20", "bas = 20", "bas"),
        ("model =", "mode =", "did you mean `model`"),
        ("published = 95", "published = 950", "less than or equal to 100"),
        ('metric = "maj@8"', 'metric = "maj"', "metric"),
        ('set = "vstar"', 'category = "x"\nscores = "s.jsonl"', "whole set"),
        ("[[figures]]", "[[figures", "not TOML"),
    ],
)
def test_a_wrong_file_is_refused(file: Path, before: str, after: str, message: str) -> None:
    file.write_text(FILE.replace(before, after, 1))
    with pytest.raises(BadConfig, match=message):
        published.read(file)


@pytest.mark.slow
def test_files_are_read_before_anything_is_evaluated(tmp_path: Path, file: Path, pixelis: Command) -> None:
    for path, message in ((file, "scores-theirs.jsonl"), (tmp_path / "none.toml", "is no file")):
        for last in ([], ["--dry-run"]):
            code, _, err = evaluation(pixelis, tmp_path, "ours", 9, f"evaluate.published={path}", *last)
            assert (code, message in err) == (1, True), err
    assert not (tmp_path / "ours").exists()
    with pytest.raises(MissingFile):
        published.read(tmp_path / "none.toml")
