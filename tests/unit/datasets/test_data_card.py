"""Data cards: content and losses of a set, examples with boxes, and hostile data as plain text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import clips
import pytest
from refined import demonstration, zoom

from pixelis.config import DialogueConfig, ToolboxConfig
from pixelis.datasets.refinement import data_card
from pixelis.datasets.refinement.row_checks import with_observations
from pixelis.datasets.synthesis.executor import Executor
from pixelis.records import Demonstration, Step

LEVEL = {"count": 400, "share": 0.333, "difficulty": 0.4, "length": 3.1, "tasks": {"a": 400}}
TOTAL = {"passed": True, "figure": 1200, "limit": 1000, "says": "number of demonstrations", "ids": {}}
ANSWERS = {"passed": False, "figure": 1, "limit": 0, "says": "wrong", "ids": {"d7": "is <b>wrong</b>"}}
CELLS = {"size": 60000, "count": 900, "cells": {"ocr/golden": {"wanted": 50, "got": 20}}, "absent": ["zoom"]}
FACTS = {
    "source": "made.jsonl",
    "rows": 1300,
    "kept": 1200,
    "bad_rows": {"not_json": 3},
    "dropped": {"duplicate": 90, "length": 7},
    "kinds": {"golden": 900, "trap_logical": 300},
    "tasks": {"object_counting": 1200},
    "lengths": {"2": 800, "5": 400},
    "levels": {"simple": LEVEL},
    "gates": [{"name": "total", **TOTAL}, {"name": "answers", **ANSWERS}],
    "sets": {"sft": CELLS},
}


class Page(HTMLParser):
    """Elements and text of a document; every element is closed in order."""

    VOID = ("meta", "img", "br", "line", "circle", "polyline", "link")

    def __init__(self, document: str):
        super().__init__()
        self.open, self.seen, self.words = list[str](), list[tuple[str, dict]](), list[str]()
        self.feed(document)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def made(**fields) -> Demonstration:
    calls = zoom(1, observation=None), zoom(2, target="obs1", observation=None)
    values = {"turns": [*calls, Step(think="It is 7", answer="7")], "quality": 0.9, "level": "hard"}
    executor = Executor(ToolboxConfig(), DialogueConfig())
    out = with_observations(demonstration(**{**values, **fields}), executor)
    assert isinstance(out, Demonstration)
    return out


@pytest.fixture(scope="module")
def shown() -> Demonstration:
    return made()


def test_the_card_says_what_is_in_and_what_is_out(shown: Demonstration, tmp_path: Path):
    path = data_card.write_card(tmp_path, FACTS, [data_card.example(shown, ToolboxConfig())], "my set")
    page = Page(path.read_text(encoding="utf-8"))
    output = page.text
    parts = ["my set", "1 200 demonstrations of 1 300 rows", "failed 1 gate", "duplicate", "not_json"]
    parts += ["object_counting", "number of demonstrations", "d7 : is <b>wrong</b>", "ocr/golden"]
    assert [part for part in parts if part not in output] == []
    assert "Required but not available at all: zoom" in output
    assert list(tmp_path.iterdir()) == [path]


def test_examples_show_the_picture_with_boxes_and_what_the_zooms_showed(shown: Demonstration):
    example = data_card.example(shown, ToolboxConfig())
    assert example.correct is True
    assert example.title == "golden · geometric_comparison · hard · quality 0.90"
    assert set(example.pictures) == {"img0", "obs1", "obs2"}
    page = Page(data_card.render_card({}, [example], "x"))
    assert sum(tag == "img" and attrs["src"].startswith("data:image/") for tag, attrs in page.seen) >= 3
    assert sum(attrs.get("class", "").startswith("box ") for tag, attrs in page.seen if tag == "span") == 2


def test_clips_show_their_frames():
    clip = {"id": "vid0", "uri": str(clips.CARPHONE), "kind": "video"}
    select = Step(op="select_frames", target="vid0", arguments={"frames": [3, 9]}, think="two moments")
    closer = zoom(1, target="vid0.1", observation=None)
    result = made(media=[clip], turns=[select, closer, Step(answer="7")])
    example = data_card.example(result, ToolboxConfig(), frames=3)
    assert [view.id for view in example.trajectory.images[:3]] == ["vid0.0", "vid0.1", "vid0.2"]
    page = Page(data_card.render_card({}, [example], "x"))
    assert sum(tag == "img" for tag, _ in page.seen) == 6
    assert "not kept" not in page.text


def test_data_is_displayed_and_never_executed(shown: Demonstration):
    evil = '<script>alert(1)</script><img src=x onerror=alert(1)>" onload="x'
    turns = [shown.turns[0].model_copy(update={"think": evil}), Step(think=evil, answer=evil)]
    hostile = shown.model_copy(update={"question": evil, "task": evil, "answers": [evil], "turns": turns})
    facts = {**FACTS, "source": evil, "tasks": {evil: 3}, "levels": {evil: {**LEVEL, "tasks": {}}}}
    facts["sets"] = {evil: {**CELLS, "cells": {evil: {"wanted": 1, "got": 0}}, "absent": [evil]}}
    facts["gates"] = [{**ANSWERS, "name": evil, "says": evil, "ids": {evil: evil}}]
    document = data_card.render_card(facts, [data_card.example(hostile, ToolboxConfig())], evil)
    page = Page(document)
    assert "script" not in {tag for tag, _ in page.seen}
    assert not any(name.startswith("on") for _, attrs in page.seen for name in attrs)
    assert all(attrs["src"].startswith("data:") for tag, attrs in page.seen if tag == "img")
    assert not re.search(r"https?://", document)
    assert "default-src 'none'" in document
