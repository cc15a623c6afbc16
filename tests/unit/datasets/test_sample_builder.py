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

SETTINGS = SynthesisConfig.model_validate(
    {"datasources": {"digits": {"path": "packaged:digits?split=train&seed=3"}}}
)
EXPECTED = {"unsuitable", "no_place", "no_conclusion", "no_distractor", "no_room"}
EXPECTED |= {"outline_differs", "nothing_found"}
ROWS = list(islice(read_questions(SETTINGS.datasources["digits"].path, epochs=1), 4))


def samples(maker: SampleBuilder, task: str) -> list[Demonstration]:
    result = []
    for row, question in enumerate(ROWS):
        for kind in get_args(SampleKind):
            try:
                result.append(maker.build(Attempt(task, kind, "digits", row), question))
            except DataFailure as failure:
                assert failure.code in EXPECTED  # noqa: PT017
    return result


@pytest.mark.parametrize("task", ["detail_perception", pytest.param("counting", marks=pytest.mark.long)])
def test_every_kind_has_its_answer_and_weight(task: str) -> None:
    built = samples(SampleBuilder(SETTINGS, 1), task)
    assert {s.kind for s in built} >= {"golden", "outcome_negative", "trap_logical", "self_correction"}
    golden = {sample.id: sample for sample in built if sample.kind == "golden"}
    for sample in built:
        right = sample.kind in ("golden", "self_correction")
        assert is_right(sample, sample.final) if right else is_wrong(sample, sample.final)
        weights = {"trap_perceptual": 1.5, "trap_logical": 1.5, "self_correction": 1.2}
        assert sample.weight == weights.get(sample.kind, 1.0)
        assert sample.provenance.source.startswith("packaged:digits")
        assert bool(sample.provenance.injected) == (sample.kind != "golden")
        if sample.kind != "golden":
            assert sample.question == golden[str(sample.provenance.parent)].question
        assert all(turn.observation is not None for turn in sample.turns if turn.op)
    assert len({sample.id for sample in built}) == len({content_key(s) for s in built}) == len(built)
    repeated = samples(SampleBuilder(SETTINGS, 1), task)
    assert [sample.model_dump_json() for sample in repeated] == [sample.model_dump_json() for sample in built]


def test_media_that_cannot_be_read_have_a_cause() -> None:
    broken = ROWS[0].model_copy(update={"media": [Media(id="img0", uri="nowhere.png")]})
    with pytest.raises(Exception, match="nowhere") as error:
        SampleBuilder(SETTINGS, 1).build(Attempt("detail_perception", "golden", "digits", 0), broken)
    assert getattr(error.value, "code", "") == "image_not_found"


def test_a_crash_costs_one_sample() -> None:
    attempt = Attempt("no such task", "golden", "digits", 0)
    with pytest.raises(DataFailure) as error:
        SampleBuilder(SETTINGS, 1).build(attempt, Question(id="q", question=""))
    assert error.value.code == "crashed"
