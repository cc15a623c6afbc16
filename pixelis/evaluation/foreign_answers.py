"""The answers of another model from a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pixelis.dialogue.dialects import DIALECTS
from pixelis.errors import BadInput
from pixelis.operations.scale import Scale
from pixelis.records import Group, Question, StopReason, Trajectory, Turn

TEXTS = ("pred", "prediction", "model_output", "output", "response")
"""Columns that hold the text of a model; the first that a row has."""
IDS = ("id", "qid", "doc_id", "question_id", "questionId")
SUBMITTED = {"questionId", "answer"}
"""Columns of a submission to DocVQA and InfographicVQA, whose ``answer`` is the model's."""


def rows_of(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of an object of answers by question id; BadInput ``no_output`` for another object.

    MM-Vet and MMMU have texts, ScienceQA numbers of options under ``results``.
    """
    answers = data["results"] if isinstance(data.get("results"), dict) else data
    if wrong := [
        id for id, value in answers.items() if isinstance(value, bool) or not isinstance(value, str | int)
    ]:
        message = f"the value of {wrong[0]!r:.60} is no answer"
        raise BadInput(message, code="no_output", fix="give rows, or an object of answers by question id")
    letters = {
        id: chr(ord("A") + value) if 0 <= value < 26 else ""
        for id, value in answers.items()
        if isinstance(value, int)
    }
    return [{"id": id, "pred": letters.get(id, value)} for id, value in answers.items()]


def _ids(questions: Sequence[Question]) -> dict[str, str]:
    counts = Counter(str(question.meta.get("original_id")) for question in questions)
    originals = {id: q.id for q in questions if counts[id := str(q.meta.get("original_id"))] == 1}
    return {**originals, **{question.id: question.id for question in questions}}


def episodes(
    rows: Iterable[Mapping[str, Any]], questions: Sequence[Question], dialect: str = "plain"
) -> list[Group]:
    """One group for each question with the texts of its rows, in the order of the questions.

    Rows without ids belong to the questions in order. Raises BadInput ``no_output`` for a row without a text,
    and ``unpaired`` when questions or rows are left over.
    """
    texts: dict[str, list[str]] = {question.id: [] for question in questions}
    ids = _ids(questions)
    for number, row in enumerate(rows):
        columns = [*TEXTS, *(["answer"] if set(row) == SUBMITTED else [])]
        text = next((row[name] for name in columns if isinstance(row.get(name), str)), None)
        if text is None:
            raise BadInput(f"row {number} has no text in {', '.join(TEXTS)}", code="no_output")
        own_id = next((str(row[name]) for name in IDS if row.get(name) is not None), None)
        id = (
            ids.get(own_id)
            if own_id is not None
            else questions[number].id
            if number < len(questions)
            else None
        )
        if id is None:
            raise BadInput(
                f"row {number}: no question {own_id}",
                code="unpaired",
                fix="score against the file of its questions",
            )
        texts[id].append(text)
    if missing := [id for id, outputs in texts.items() if not outputs]:
        message = f"{len(missing)} questions have no answer, the first is {missing[0]}"
        raise BadInput(message, code="unpaired", fix="set evaluate.questions to the number of rows")
    groups = []
    for question in questions:
        trajectories = []
        for i, text in enumerate(texts[question.id]):
            answer = DIALECTS[dialect].parse(text, {}, Scale("unit")).answer
            trajectories.append(
                Trajectory(
                    id=f"{question.id}-{i}",
                    question_id=question.id,
                    group_id=question.id,
                    dialect=dialect,
                    turns=[Turn(role="assistant", text=text)],
                    answer=answer,
                    stop_reason=StopReason.NO_ACTION if answer is None else StopReason.ANSWER,
                )
            )
        groups.append(Group(id=question.id, question=question, trajectories=trajectories))
    return groups


def with_scores(
    rows: Iterable[Mapping[str, Any]], groups: Sequence[Group], answers: Mapping[str, str | None]
) -> list[dict[str, Any]]:
    left = {group.question.id: list(group.trajectories) for group in groups}
    order, result = [group.question.id for group in groups], []
    ids = _ids([group.question for group in groups])
    for number, row in enumerate(rows):
        own_id = next((str(row[name]) for name in IDS if row.get(name) is not None), None)
        trajectory = left[ids[own_id] if own_id is not None else order[number]].pop(0)
        scored = {"score": trajectory.rewards.get("accuracy"), "extracted_answer": answers[trajectory.id]}
        result.append({**row, **scored, **({"unscored": trajectory.unscored} if trajectory.unscored else {})})
    return result
