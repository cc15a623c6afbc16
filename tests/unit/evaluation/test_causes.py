"""Why episodes are wrong, on pictures of the card world and on questions that need several operations."""

from __future__ import annotations

import pytest

from pixelis.actors.evaluation_report import choose_with_causes as choose
from pixelis.datasets.card_questions import question_row
from pixelis.datasets.cards import scene_of as scene
from pixelis.datasets.cards import zoom_box
from pixelis.evaluation import table
from pixelis.evaluation.capabilities import capabilities
from pixelis.evaluation.causes import CAUSES, cause_of, error_causes
from pixelis.evaluation.metrics import summarise
from pixelis.evaluation.samples import breakdown
from pixelis.records import Action, Group, ImageView, Observation, Question, StopReason, Trajectory, Turn
from pixelis.telemetry.html.report import render_report

CARD = Question.model_validate(question_row("test", 7, 0))
THERE = zoom_box(scene("test", 7, 0).target)
ELSEWHERE = tuple((v + 0.5) % 0.9 for v in THERE[:2])


def group(
    question: Question, *calls: tuple, answer: str | None = "?", accuracy: float = 0.0, ok: bool = True
) -> Group:
    """One episode with these calls, each an operation, its views and its data."""
    turns, images = list[Turn](), [ImageView(id="img0")]
    for op, views, data in calls:
        images += views
        turns.append(Turn(role="assistant", action=Action(op=op)))
        turns.append(
            Turn(
                role="tool", observation=Observation(status="ok" if ok else "error", images=views, data=data)
            )
        )
    stop = StopReason.LENGTH if answer is None else StopReason.ANSWER
    trajectory = Trajectory(
        question_id=question.id,
        group_id=question.id,
        turns=turns,
        images=images,
        answer=answer,
        stop_reason=stop,
        rewards={"accuracy": accuracy},
    )
    return Group(id=question.id, question=question, trajectories=[trajectory])


def zoom(x0: float, y0: float) -> tuple:
    return "zoom_in", [ImageView(id="obs1", parent="img0", box=(x0, y0, x0 + 0.1, y0 + 0.1))], {}


def read(text: str) -> tuple:
    return "read_text", [], {"lines": [{"text": text}]}


SIGN = CARD.model_copy(
    update={"id": "sign", "meta": {"expected_calls": [{"op": "read_text", "text": "Exit"}]}}
)
CASES = {
    "no answer": group(CARD, zoom(*THERE[:2]), answer=None),
    "never looked": group(CARD),
    "looked elsewhere": group(CARD, zoom(*ELSEWHERE)),
    "misread": group(CARD, zoom(*THERE[:2])),
    "reasoned wrongly": group(SIGN, read("Exit")),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_first_step_that_went_wrong_is_the_cause(cause):
    assert cause_of(CASES[cause], CASES[cause].trajectories[0]) == cause


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (group(SIGN, read("Exif")), "misread"),
        (group(SIGN, read("Bakery")), "looked elsewhere"),
        (group(SIGN, zoom(0.1, 0.1)), "looked elsewhere"),
        (group(CARD, zoom(*THERE[:2]), ok=False), "never looked"),
        (group(CARD, zoom(*THERE[:2]), accuracy=1.0), None),
        (group(CARD.model_copy(update={"meta": {}}), zoom(*THERE[:2])), None),
    ],
    ids=["another reading", "another text", "not read", "a failed call", "right", "nothing expected"],
)
def test_other_causes(wrong, cause):
    assert cause_of(wrong, wrong.trajectories[0]) == cause


def test_the_table_and_the_page_count_causes_and_the_page_shows_one_of_each():
    groups = [CASES["misread"], CASES["misread"], CASES["never looked"], CASES["looked elsewhere"]]
    summary = {"name": "x", **summarise(groups), **breakdown(groups), "capabilities": capabilities(groups)}
    summary["error_causes"] = error_causes(groups)
    assert summary["error_causes"]["misread"] == 2
    assert "never looked 1, looked elsewhere 1, misread 2" in "\n".join(table.lines(summary))
    page = render_report({"arms": [summary]}, [], [])
    assert "misread <b>2</b>" in page
    titles = [title for title, _, _ in choose("x", groups, [None] * 4, 3)]
    assert titles == ["x: misread", "x: never looked", "x: looked elsewhere"]
