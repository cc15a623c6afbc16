"""Why episodes are wrong, on pictures of the card world and on questions that need several operations."""

from __future__ import annotations

from typing import Any

import pytest
from test_capabilities import episode, read
from test_capabilities import zoom as capability_zoom

from pixelis.actors.evaluation_report import choose_with_causes as choose
from pixelis.datasets.card_questions import question_row
from pixelis.datasets.cards import scene_of as scene
from pixelis.datasets.cards import zoom_box
from pixelis.evaluation import table
from pixelis.evaluation.capabilities import capabilities
from pixelis.evaluation.causes import CAUSES, cause_of, error_causes
from pixelis.evaluation.metrics import summarise
from pixelis.evaluation.samples import breakdown
from pixelis.records import Group, Question
from pixelis.telemetry.html.report import render_report

CARD = Question.model_validate(question_row("test", 7, 0))
THERE = zoom_box(scene("test", 7, 0).target)
ELSEWHERE = tuple((v + 0.5) % 0.9 for v in THERE[:2])


def zoom(x0: float, y0: float) -> tuple:
    return capability_zoom(x0, y0, x0 + 0.1, y0 + 0.1)


def wrong(question: Question, *calls: tuple, **more: Any) -> Group:
    return episode(*calls, question=question, **{"accuracy": 0.0, "answer": "?", **more})


EXIT = {"expected_calls": [{"op": "read_text", "text": "Exit"}]}
SIGN = CARD.model_copy(update={"id": "sign", "meta": EXIT})
CASES = {
    "no answer": wrong(CARD, zoom(*THERE[:2]), answer=None),
    "never looked": wrong(CARD),
    "looked elsewhere": wrong(CARD, zoom(*ELSEWHERE)),
    "misread": wrong(CARD, zoom(*THERE[:2])),
    "reasoned wrongly": wrong(SIGN, read("Exit")),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_first_step_that_went_wrong_is_the_cause(cause):
    assert cause_of(CASES[cause], CASES[cause].trajectories[0]) == cause


@pytest.mark.parametrize(
    ("group", "cause"),
    [
        (wrong(SIGN, read("Exif")), "misread"),
        (wrong(SIGN, read("Bakery")), "looked elsewhere"),
        (wrong(SIGN, zoom(0.1, 0.1)), "looked elsewhere"),
        (wrong(CARD, zoom(*THERE[:2]), ok=False), "never looked"),
        (wrong(CARD, zoom(*THERE[:2]), accuracy=1.0), None),
        (wrong(CARD.model_copy(update={"meta": {}}), zoom(*THERE[:2])), None),
    ],
    ids=["another reading", "another text", "not read", "a failed call", "right", "nothing expected"],
)
def test_other_causes(group, cause):
    assert cause_of(group, group.trajectories[0]) == cause


def test_the_table_and_the_page_count_causes_and_the_page_shows_one_of_each():
    groups = [CASES["misread"], CASES["misread"], CASES["never looked"], CASES["looked elsewhere"]]
    summary = {"name": "x", **summarise(groups), **breakdown(groups), "capabilities": capabilities(groups)}
    summary["error_causes"] = error_causes(groups)
    assert summary["error_causes"]["misread"] == 2
    text = "\n".join(table.lines(summary))
    for said in ("never looked 1, looked elsewhere 1, misread 2", "thing in view 0.500", "in order in 0.750"):
        assert said in text
    page = render_report({"arms": [summary]}, [], [])
    assert "misread <b>2</b>" in page
    titles = [title for title, _, _ in choose("x", groups, [None] * 4, 3)]
    assert titles == ["x: misread", "x: never looked", "x: looked elsewhere"]
