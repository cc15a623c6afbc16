"""Inputs of an evaluation are refused before anything runs: its baseline, answers of another model, names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Command

from pixelis.config import load
from pixelis.datasets.questions import read_questions
from pixelis.errors import BadConfig, BadInput, MissingFile
from pixelis.jobs import driver, evaluate
from pixelis.jobs.evaluate_api import answer_rows
from pixelis.jobs.evaluation_arms import baseline_scores, check_baseline

ANSWERS = [{"id": f"q{i}", "pred": "<answer>7</answer>"} for i in range(3)]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Three questions without pictures."""
    rows = [{"id": f"q{i}", "question": "How many?", "answers": ["7"]} for i in range(3)]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save_scores(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"scores-{name}.jsonl").write_text(
        '{"id": "q0", "scores": [1.0, null]}\n{"id": "q1", "scores": [null]}\n'
    )


def test_an_evaluation_is_not_compared_with_itself(tmp_path: Path, questions: Path, pixelis: Command) -> None:
    run = tmp_path / "run"
    save_scores(run, "run")
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "given.json").write_text(json.dumps(ANSWERS))
    before = sorted(run.iterdir())
    for baseline in (str(run), str(tmp_path / "link")):
        words = [f"evaluate.baseline={baseline}", f"run.dir={run}", f"data.evaluate={questions}"]
        with pytest.raises(BadConfig, match="of this evaluation"):
            evaluate.run(load(None, words))
        api = ["evaluate.api.url=http://127.0.0.1:9", "evaluate.api.model=m", "evaluate.api.api_key_env="]
        for more in (api, [f"evaluate.answers={tmp_path / 'given.json'}"]):
            for last in ([], ["--dry-run"]):
                code, _, err = pixelis("evaluate", *words, *more, *last)
                assert (code, "of this evaluation" in err) == (2, True), err
    assert sorted(run.iterdir()) == before


def test_the_scores_of_each_set_and_budget_are_found_before_it_is_evaluated(tmp_path: Path) -> None:
    other = tmp_path / "other"
    keys = [f"evaluate.baseline={other}", "evaluate.sets={a: 'cards:?split=test', b: 'cards:?seed=2'}"]
    save_scores(other, "a")
    check_baseline(load(None, keys))  # the only scores are those of every set
    save_scores(other, "b")
    check_baseline(load(None, keys))
    with pytest.raises(MissingFile, match=r"no scores-a-90000px\.jsonl"):
        check_baseline(load(None, [*keys, "evaluate.max_pixels=[90000]"]))
    assert baseline_scores(str(other), "a") == {"q0": 1.0}


def test_a_dry_run_reads_the_answers_and_the_baseline_and_no_policy(
    tmp_path: Path, questions: Path, pixelis: Command
) -> None:
    keys = [f"data.evaluate={questions}", f"run.dir={tmp_path / 'run'}", "policy.model=/none", "--dry-run"]
    missing = [f"evaluate.answers={tmp_path / 'none.json'}", f"evaluate.baseline={tmp_path / 'none'}"]
    code, _, err = pixelis("evaluate", *keys, *missing)
    assert code == 1
    assert "fix: correct evaluate.answers and evaluate.baseline" in err
    (tmp_path / "given.json").write_text(json.dumps(ANSWERS))
    code, _, err = pixelis("evaluate", *keys, f"evaluate.answers={tmp_path / 'given.json'}")
    assert code == 0, err
    assert not (tmp_path / "run").exists()


def test_held_out_questions_must_be_complete_whatever_training_may_skip(
    tmp_path: Path, questions: Path, pixelis: Command
) -> None:
    with questions.open("a") as file:
        file.write("{}\n")
    words = [f"data.evaluate={questions}", "data.max_bad_rows=1", f"run.dir={tmp_path / 'run'}"]
    code, _, err = pixelis("evaluate", *words, "--dry-run")
    assert (code, "a held-out set must be complete" in err, "max_bad_rows" in err) == (1, True, False), err
    with pytest.raises(BadInput) as caught, driver.run_folder(load(None, words), held_out=[str(questions)]):
        pass
    assert caught.value.fix == "correct or remove the row: a held-out set must be complete"
    with driver.run_folder(load(None, words), str(questions)):
        pass
    with pytest.raises(BadInput) as caught:
        list(read_questions(str(questions), epochs=1, max_bad_rows=0))
    assert "data.max_bad_rows" in str(caught.value.fix)


@pytest.mark.parametrize("name", ["vstar/direct", "", "/", "x" * 101])
def test_names_that_cannot_be_those_of_files_are_refused(name: str) -> None:
    for word in (f"run.name={name}", f"evaluate.sets={{{json.dumps(name)}: 'cards:'}}"):
        with pytest.raises(BadConfig, match="names files"):
            load(None, [word])


def test_answers_in_another_encoding_and_a_file_as_folder_end_with_a_message(
    tmp_path: Path, questions: Path, pixelis: Command
) -> None:
    answers = tmp_path / "given.json"
    text = json.dumps({"q0": "sept é", "q1": "7", "q2": "7"}, ensure_ascii=False)
    for wrong in (text, json.dumps([{"pred": "é"}], ensure_ascii=False)):
        answers.write_text(wrong, encoding="latin1")
        with pytest.raises(BadInput):
            answer_rows(answers)
    answers.write_text(text, encoding="utf-8-sig")
    assert answer_rows(answers)[0] == {"id": "q0", "pred": "sept é"}
    words = [f"data.evaluate={questions}", f"evaluate.answers={answers}", f"run.dir={questions}"]
    for folder in (questions, questions / "run"):
        code, _, err = pixelis("evaluate", *words, f"run.dir={folder}")
        assert (code, "is a file, or below one" in err) == (2, True), err
        with (
            pytest.raises(BadConfig, match="is a file"),
            driver.run_folder(load(None, [f"run.dir={folder}"])),
        ):
            pass
