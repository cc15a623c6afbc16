"""The file of `pixelis answer`: what is in it is not answered again, foreign content is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pixelis.config import load
from pixelis.errors import BadConfig, BadInput, InfraFailure
from pixelis.jobs.answer import AnswerFile, answer_all, answer_file, correctness, parse, settings_of
from pixelis.records import Question

QUESTIONS = [(number, Question(id=f"q{number}", question=f"say {number}")) for number in range(6)]


async def echo(question: Question) -> dict[str, Any]:
    await asyncio.sleep(0)
    if question.id == "q4":
        raise BadInput("no picture", code="image_not_found")
    return {"answer": question.question, "error": None}


def fill(out: AnswerFile, questions: list[tuple[int, Question]] = QUESTIONS, answer: Any = echo) -> None:
    asyncio.run(answer_all(iter(questions), out, answer, 3))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_question_is_answered_once_over_several_runs(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    async def fail_at_3(question: Question) -> dict[str, Any]:
        if question.id == "q3":
            raise InfraFailure("the service is gone")
        return await echo(question)

    with pytest.raises(InfraFailure), answer_file(path, "s") as out:
        fill(out, answer=fail_at_3)
    first = rows(path)
    path.write_bytes(path.read_bytes() + b'{"number": 5, "id": "q')
    with answer_file(path, "s") as out:
        fill(out)
    assert rows(path)[: len(first)] == first
    assert sorted(row["id"] for row in rows(path)) == [question.id for _, question in QUESTIONS]
    assert [row["error"]["code"] for row in rows(path) if row["error"]] == ["image_not_found"]
    with answer_file(path, "s") as out:
        before = path.read_bytes()
        fill(out)
        assert path.read_bytes() == before


def test_a_file_of_other_answers_or_another_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with answer_file(path, "s") as out:
        fill(out, QUESTIONS[:1])
        with pytest.raises(BadInput, match="another process"), answer_file(path, "s"):
            pass
    with pytest.raises(BadInput, match="other settings"), answer_file(path, "t"):
        pass
    (tmp_path / "notes.txt").write_text("my notes\n")
    with pytest.raises(BadInput, match="no answers"), answer_file(tmp_path / "notes.txt", "s"):
        pass
    assert (tmp_path / "notes.txt").read_text() == "my notes\n"
    for wrong in (tmp_path, tmp_path / "notes.txt" / "out.jsonl"):
        with pytest.raises(BadConfig, match="is a folder, or below a file"), answer_file(wrong, "s"):
            pass


def test_answers_with_any_line_separator_are_compared_with_the_truth(tmp_path: Path) -> None:
    questions, path = tmp_path / "questions.jsonl", tmp_path / "out.jsonl"
    asked = [
        Question(id="q0", question="one\u2028two\x85three", answers=["7"]),
        Question(id="q1", question="q", answers=["8"]),
    ]
    questions.write_text("".join(question.model_dump_json() + "\n" for question in asked), encoding="utf-8")

    async def seven(question: Question) -> dict[str, Any]:
        return {"answer": "7", "confidence": 0.5, "verdict": {"reason": None}, "error": None}

    with answer_file(path, "s") as out:
        fill(out, [*enumerate(asked)], seven)
    config = load(None, [f"data.evaluate={questions}"])
    assert correctness(config, None, path) == ([0.5, 0.5], [True, False])


@pytest.mark.parametrize(
    ("word", "counts"),
    [
        ("rewards.scorer=math", True),
        ("rewards.tasks={counting: {scorer: count}}", True),
        ("rewards.tasks={counting: {format: turns}}", False),
        ("rewards.weights.format=1", False),
        ("toolbox.operations=[zoom_in]", True),
        ("toolbox.workers=3", False),
        ("engine.name=vllm", True),
        ("engine.workers=3", False),
        ("policy.adapter=runs/other", True),
        ("serve.samples=3", True),
    ],
)
def test_answers_of_other_settings_are_told_apart(word: str, counts: bool) -> None:
    configs = [load("configs/nano/evaluate.yaml", words) for words in ([], [word])]
    before, after = (settings_of(config, None) for config in configs)
    assert (before != after) == counts
    settings_of_a_service = {settings_of(config, "http://x") for config in configs}
    assert len(settings_of_a_service) == 1, "those are the service's own"


def test_the_command_line_has_a_file_and_configuration() -> None:
    source = "cards:?split=test&seed=1"
    options = parse(["--url", "http://x", source, "a.yaml", "serve.samples=2", "--limit", "3", "--dry-run"])
    assert (options.source, options.url, options.limit) == (source, "http://x", 3)
    assert options.rest == ["a.yaml", "serve.samples=2", "--dry-run", f"data.evaluate={source}"]
