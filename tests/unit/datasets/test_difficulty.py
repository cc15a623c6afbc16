"""Difficulty is the published formula; the split keeps its shares whatever the scores are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refined import demonstration, zoom

from pixelis.datasets.refinement import difficulty
from pixelis.datasets.refinement.actions import actions, category
from pixelis.records import Step


def test_the_parts_of_a_demonstration_of_two_zooms():
    parts = difficulty.components(demonstration())  # think zoom think zoom think
    assert parts["length"] == pytest.approx(math.log(6) / math.log(16))
    assert parts["operations"] == pytest.approx((3 * 0.5 + 2 * 2) / 15 + 0.2 * 2 / 5)
    assert parts["reasoning"] == pytest.approx(1.0)  # 3 of 5
    assert parts["errors"] == 0
    assert parts["task"] == 0.8
    expected = 0.30 * parts["length"] + 0.25 * parts["operations"] + 0.20 + 0.10 * 0.8
    assert difficulty.score(demonstration()) == pytest.approx(expected)


def test_difficulty_of_short_demonstrations_and_of_those_without_thoughts():
    silent = demonstration(turns=[Step(answer="7")])
    assert actions(silent) == []
    parts = difficulty.components(silent)
    assert (parts["length"], parts["operations"], parts["reasoning"]) == (0.1, 0.3, 0.0)
    assert difficulty.components(demonstration(turns=[zoom(think=None), Step(answer="7")]))["length"] == 0.1
    thoughtful = demonstration(turns=[Step(think="it is seven", answer="7")])
    assert difficulty.components(thoughtful)["reasoning"] == pytest.approx(0.7)


def test_errors_add_up():
    same = [zoom(1), zoom(1), zoom(1), Step(answer="7")]
    # One triple, one place twice
    assert difficulty.components(demonstration(turns=same))["errors"] == pytest.approx(0.2 + 0.2)
    four = [*(zoom(i) for i in range(4)), Step(answer="7")]
    assert difficulty.components(demonstration(turns=four))["errors"] == pytest.approx(0.4), "two triples"
    corrected = demonstration(kind="self_correction")
    assert difficulty.components(corrected)["errors"] == pytest.approx(0.3 + 0.15)
    for kind, value in (("trap_perceptual", 0.2), ("trap_logical", 0.25), ("outcome_negative", 0.1)):
        assert difficulty.components(demonstration(kind=kind))["errors"] == pytest.approx(value)


@pytest.mark.parametrize(
    ("task", "value", "group"),
    [
        ("temporal_tracking", 1.0, "spatio_temporal"),
        ("frame_selection", 1.0, "select"),
        ("geometric_comparison", 0.8, "geometric"),
        ("spatial_reasoning", 0.7, "vqa"),
        ("relationship_detection", 0.6, "vqa"),
        ("attribute_recognition", 0.5, "vqa"),
        ("object_counting", 0.4, "vqa"),
        ("text_extraction", 0.3, "ocr"),
        ("detail_perception", 0.5, "zoom"),
        ("qa", 0.5, "vqa"),
    ],
)
def test_tasks(task: str, value: float, group: str):
    assert difficulty.task_difficulty(task) == value
    assert category(task) == group


@given(st.lists(st.floats(0.1, 1), min_size=4, max_size=200), st.booleans())
def test_levels_keep_their_shares_and_their_order(scores: list[float], one_value: bool):
    scores = [0.5] * len(scores) if one_value else scores
    ids = [f"d{i}" for i in range(len(scores))]
    levels = difficulty.split(scores, ids)
    low = [s for s, level in zip(scores, levels, strict=True) if level == "simple"]
    high = [s for s, level in zip(scores, levels, strict=True) if level == "hard"]
    assert abs(len(low) - 0.33 * len(scores)) <= 1
    assert abs(len(high) - 0.34 * len(scores)) <= 1
    assert not low or not high or max(low) <= min(high) + 1e-9
    backwards = difficulty.split(scores[::-1], ids[::-1])
    assert backwards[::-1] == levels


def test_outliers_are_beyond_one_and_a_half_quartile_ranges():
    scores = [0.4, 0.45, 0.5, 0.5, 0.55, 0.6, 0.99]
    assert difficulty.outliers(scores) == [False] * 6 + [True]
    assert difficulty.outliers([0.5] * 9) == [False] * 9
    assert difficulty.outliers([]) == []


def test_a_set_is_graded():
    rows = [demonstration(f"d{i}", zooms=2 + i % 3) for i in range(30)]
    kept = [
        d.model_copy(update={"difficulty": score, "level": level})
        for d, (score, level) in zip(rows, difficulty.grade(rows), strict=True)
    ]
    statistics = difficulty.statistics(kept)
    assert [statistics[level]["count"] for level in difficulty.LEVELS] == [10, 10, 10]
    assert statistics["simple"]["length"] < statistics["hard"]["length"]
    assert statistics["simple"]["difficulty"] < statistics["hard"]["difficulty"]
