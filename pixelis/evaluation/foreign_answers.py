"""Scores the answers of another model from rows of a file, as Reason-RFT's and R1-V's evaluations write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pixelis.dialogue.dialects import DIALECTS
from pixelis.errors import BadInput
from pixelis.operations.scale import Scale
from pixelis.records import Group, Question, StopReason, Trajectory, Turn

TEXTS = ("pred", "prediction", "model_output", "output", "response")
"""Columns that hold the text of a model; the first that a row has."""
IDS = ("id", "qid", "doc_id", "question_id")


def episodes(rows: Iterable[Mapping[str, Any]], questions: Sequence[Question], dialect: str = "plain") -> list[Group]:
    """One group for each question with the texts of its rows, in the order of the questions.

    A row belongs to the question of its id; rows without ids belong to the questions in order. Raises BadInput ``no_output`` for
    a row without a text, and ``unpaired`` when questions or rows are left over.
    """
    texts: dict[str, list[str]] = {question.id: [] for question in questions}
    for number, row in enumerate(rows):
        column = next((name for name in TEXTS if isinstance(row.get(name), str)), None)
        if column is None:
            raise BadInput(f"row {number} has no text in {', '.join(TEXTS)}", code="no_output")
        own_id = next((str(row[name]) for name in IDS if row.get(name) is not None), None)
        if own_id is None and number < len(questions):
            own_id = questions[number].id
        if own_id not in texts:
            raise BadInput(f"row {number}: no question {own_id}", code="unpaired", fix="score against the file of its questions")
        texts[own_id].append(row[column])
    if missing := [id for id, outputs in texts.items() if not outputs]:
        message = f"{len(missing)} questions have no answer, the first is {missing[0]}"
        raise BadInput(message, code="unpaired", fix="set evaluate.questions to the number of rows")
    return [_group(question, texts[question.id], dialect) for question in questions]


def _group(question: Question, texts: Sequence[str], dialect: str) -> Group:
    trajectories = []
    for i, text in enumerate(texts):
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
    return Group(id=question.id, question=question, trajectories=trajectories)


def with_scores(
    rows: Iterable[Mapping[str, Any]], groups: Sequence[Group], answers: Mapping[str, str | None]
) -> list[dict[str, Any]]:
    """The rows with ``score``, ``extracted_answer`` (of ``answers`` by trajectory) and the cause of being ``unscored``."""
    left = {group.question.id: list(group.trajectories) for group in groups}
    order, result = [group.question.id for group in groups], []
    for number, row in enumerate(rows):
        own_id = next((str(row[name]) for name in IDS if row.get(name) is not None), None)
        trajectory = left[own_id if own_id is not None else order[number]].pop(0)
        scored = {"score": trajectory.rewards.get("accuracy"), "extracted_answer": answers[trajectory.id]}
        result.append({**row, **scored, **({"unscored": trajectory.unscored} if trajectory.unscored else {})})
    return result
