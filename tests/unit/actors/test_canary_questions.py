"""The canary's questions: labelled, and enough of them to rule out a drop, which `--dry-run` checks too."""

from __future__ import annotations

from pathlib import Path

import pytest

from pixelis.actors.canary import canary_questions
from pixelis.config import Config, load
from pixelis.errors import BadInput
from pixelis.jobs import serve
from pixelis.jobs.dry_run import check_inputs
from pixelis.records import Question


def config(folder: Path, count: int, answers: list[str] | None, *more: str) -> Config:
    rows = [Question(id=f"q{i}", question="which?", answers=answers).model_dump_json() for i in range(count)]
    (folder / "canary.jsonl").write_text("".join(f"{row}\n" for row in rows))
    return load(None, [f"run.dir={folder}/run", f"evolution.canary.questions={folder}/canary.jsonl", *more])


def test_questions_come_from_the_whole_set_and_are_the_same_after_a_restart(tmp_path: Path) -> None:
    settings = config(tmp_path, 700, ["7"], "evolution.canary.count=66").evolution.canary
    numbers = [int(q.id.removeprefix("q")) for q in canary_questions(settings)]
    assert len(set(numbers)) == 66
    assert len([number for number in numbers if number < 350]) in range(20, 47)
    assert numbers == [int(q.id.removeprefix("q")) for q in canary_questions(settings)]


def test_too_few_questions_are_refused_with_the_number_that_suffices(tmp_path: Path) -> None:
    few = config(tmp_path, 20, ["7"])
    with pytest.raises(BadInput, match=r"20 canary questions cannot rule out a drop of 0\.03") as error:
        canary_questions(few.evolution.canary)
    assert "64 or more" in str(error.value.fix)
    with pytest.raises(BadInput, match="20 canary questions cannot rule out"):
        check_inputs(serve.inputs(few))
    for looser in ("evolution.canary.tolerance=0.1", "evolution.canary.risk=1"):
        assert len(canary_questions(config(tmp_path, 20, ["7"], looser).evolution.canary)) == 20


def test_a_question_without_an_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"q\d+ in .* has no answer"):
        canary_questions(config(tmp_path, 70, None).evolution.canary)
