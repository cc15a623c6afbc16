"""Samples of real tasks: right ones are right, wrong ones wrong, and a second maker makes the same."""

from __future__ import annotations

from itertools import islice
from typing import get_args

import pytest

from pixelis.config.synthesis import SynthesisConfig
from pixelis.datasets.questions import read_questions
from pixelis.datasets.synthesis.checking import is_right, is_wrong
from pixelis.datasets.synthesis.sample_builder import Attempt, SampleBuilder, content_key
from pixelis.errors import DataFailure
from pixelis.records import Demonstration, Media, Question, SampleKind

SETTINGS = SynthesisConfig.model_validate({"datasources": {"digits": {"path": "packaged:digits?split=train&seed=3"}}})
ROWS = list(islice(read_questions(SETTINGS.datasources["digits"].path, epochs=1), 4))


def samples(maker: SampleBuilder, task: str) -> list[Demonstration]:
    out = []
    for row, question in enumerate(ROWS):
        for kind in get_args(SampleKind):
            try:
                out.append(maker.build(Attempt(task, kind, "digits", row), question))
            except DataFailure as failure:
                assert failure.code in ("unsuitable", "no_place", "no_conclusion", "no_distractor", "no_room")  # noqa: PT017
    return out


@pytest.mark.parametrize("task", ["detail_perception", "counting"])
def test_kinds_keep_their_word(task: str) -> None:
    made = samples(SampleBuilder(SETTINGS, 1), task)
    assert {one.kind for one in made} >= {"golden", "outcome_negative", "trap_logical", "self_correction"}
    golden = {one.id: one for one in made if one.kind == "golden"}
    for one in made:
        right = one.kind in ("golden", "self_correction")
        assert is_right(one, one.final) if right else is_wrong(one, one.final)
        assert one.weight == {"trap_perceptual": 1.5, "trap_logical": 1.5, "self_correction": 1.2}.get(one.kind, 1.0)
        assert one.provenance is not None
        assert one.provenance.source.startswith("packaged:digits")
        assert bool(one.provenance.injected) == (one.kind != "golden")
        if one.kind != "golden":
            assert one.question == golden[str(one.provenance.parent)].question
        assert all(turn.observation is not None for turn in one.turns if turn.op)
    assert len({one.id for one in made}) == len({content_key(one) for one in made}) == len(made)
    again = samples(SampleBuilder(SETTINGS, 1), task)
    assert [one.model_dump_json() for one in again] == [one.model_dump_json() for one in made]
    assert [one.id for one in samples(SampleBuilder(SETTINGS, 2), task)] != [one.id for one in made]


def test_media_that_cannot_be_read_have_a_cause() -> None:
    broken = ROWS[0].model_copy(update={"media": [Media(id="img0", uri="nowhere.png")]})
    with pytest.raises(Exception, match="nowhere") as error:
        SampleBuilder(SETTINGS, 1).build(Attempt("detail_perception", "golden", "digits", 0), broken)
    assert getattr(error.value, "code", "") == "image_not_found"


def test_a_crash_costs_one_sample() -> None:
    with pytest.raises(DataFailure) as error:
        SampleBuilder(SETTINGS, 1).build(Attempt("no such task", "golden", "digits", 0), Question(id="q", question=""))
    assert error.value.code == "crashed"
