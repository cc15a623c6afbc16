"""Questions about what the user points at: the answer is what the operation at that place shows."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pixelis.datasets import packaged
from pixelis.datasets.questions import read_demonstrations, read_rows
from pixelis.datasets.synthesis.evidence import with_expected_calls
from pixelis.datasets.synthesis.executor import Executor
from pixelis.datasets.synthesis.sample import Sample
from pixelis.datasets.synthesis.tasks import TASKS
from pixelis.errors import BadInput, DataFailure
from pixelis.records import Annotations, Demonstration, Line

SOURCES = {
    "colour_at": "packaged:photos?count=60",
    "size_at": "packaged:shapes?count=9",
    "share_at": "packaged:coins?count=9",
    "corners_at": "packaged:shapes?count=9",
    "text_at": "packaged:text?count=9",
    "digit_at": "packaged:digits?count=9&clip=yes",
    "goes": "packaged:clips?count=9&event=motion",
    "stays": "packaged:clips?count=9&event=exit",
}
CALLS = {
    "colour_at": ["segment_object_at", "get_properties"],
    "size_at": ["segment_object_at", "get_properties"],
    "share_at": ["segment_object_at"],
    "corners_at": ["segment_object_at", "get_properties"],
    "text_at": ["read_text"],
    "goes": ["track_object"],
    "stays": ["track_object"],
}
EXECUTOR = Executor(multiple=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("media")


def make(form: str, source: str, folder: Path) -> Demonstration:
    """The first demonstration of a form that a source offers."""
    for number, question in enumerate(packaged.read(source, folder)):
        try:
            sample = Sample(question, np.random.default_rng(number), EXECUTOR, "terse", "pointing", form)
            return with_expected_calls(TASKS["pointing"].forms[form](sample))
        except DataFailure:
            continue
    raise AssertionError(f"{source} offers nothing for {form}")


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in SOURCES if form != "digit_at"])
def test_the_operation_at_the_place_shows_the_answer(form, folder):
    sample = make(form, SOURCES[form], folder)
    assert [step.op for step in sample.steps] == CALLS[form]
    assert [call["op"] for call in sample.meta["expected_calls"]] == CALLS[form]
    first = sample.steps[0].arguments
    if form != "text_at":
        numbers = [int(text) for text in re.findall(r"\d+", sample.question)]
        place = first.get("point", first.get("box"))
        assert numbers == [round(1000 * at) for at in place]
    shown = sample.steps[-1].observation.text
    if form in ("goes", "stays"):
        assert sample.final == ("no" if form == "stays" else sample.final)
        assert ("not seen after" in shown) == (form == "stays")
        assert form == "stays" or f"direction {sample.final}, " in shown
    else:
        assert str(sample.final) in shown
    if form == "text_at":
        assert sample.meta["expected_calls"][0]["text"] == sample.final


@pytest.mark.slow
def test_a_moment_of_a_clip_shows_a_large_digit_at_once_and_a_small_one_after_a_zoom(folder):
    calls = set()
    for number, question in enumerate(packaged.read("packaged:digits?count=4&clip=yes", folder)):
        sample = Sample(question, np.random.default_rng(number), EXECUTOR, "terse", "pointing", "digit_at")
        made = TASKS["pointing"].forms["digit_at"](sample)
        second, colour = (
            int(re.search(r"second (\d)", made.question)[1]),
            re.search(r"the (\w+) frame", made.question)[1],
        )
        assert made.steps[0].arguments == {"frames": [second]}
        truth = [
            r for r in question.annotations.regions if r.frame == second and r.attributes["color"] == colour
        ]
        assert made.answers == [truth[0].attributes["digit"]]
        calls.add(tuple(step.op for step in made.steps))
    assert calls == {("select_frames",), ("select_frames", "zoom_in")}


def test_a_quarter_with_two_texts_is_not_asked_about(folder):
    question = next(packaged.read("packaged:text?count=2&seed=1", folder))
    lines = [Line(text="Exit", box=(0.1, 0.1, 0.2, 0.15)), Line(text="Bakery", box=(0.1, 0.3, 0.2, 0.35))]
    question = question.model_copy(update={"annotations": Annotations(lines=lines)})
    with pytest.raises(DataFailure) as failure:
        TASKS["pointing"].forms["text_at"](
            Sample(question, np.random.default_rng(0), EXECUTOR, "terse", "pointing", "text_at")
        )
    assert failure.value.code == "unsuitable"


def test_an_object_that_leaves_is_annotated_until_it_has_left(folder):
    for question in packaged.read("packaged:clips?count=3&event=exit", folder):
        frames = [region.frame for region in question.annotations.regions]
        last = question.annotations.regions[-1].box
        assert 9 <= len(frames) < 36
        assert frames == list(range(len(frames)))
        assert min(last[:2]) < 0.02 or max(last[2:]) > 0.98


def test_a_share_of_the_demonstrations_answers_at_once(tmp_path):
    rows = list(read_demonstrations("cards:?split=train", 60, 1, 0.0))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row.model_dump_json() for row in rows), encoding="utf-8")
    read = {share: list(read_rows(f"{path}?direct={share}", Demonstration)) for share in (0, 0.5, 1)}
    assert [row.turns for row in read[0]] == [row.turns for row in rows]
    assert all([turn.answer for turn in row.turns] == row.answers for row in read[1])
    direct = [row.id for row in read[0.5] if len(row.turns) == 1]
    assert 15 <= len(direct) <= 45
    assert direct == [row.id for row in read_rows(f"{path}?direct=0.5", Demonstration) if len(row.turns) == 1]
    with pytest.raises(BadInput):
        list(read_rows(f"{path}?direct=2", Demonstration))
