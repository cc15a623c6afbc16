"""The curriculum of demonstrations: it goes on, takes back, rests and resumes as its settings say."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelis.config import SftCurriculumConfig, StageConfig
from pixelis.datasets.curriculum import Curriculum

EVERY = 10


def settings(**values: object) -> SftCurriculumConfig:
    given = {"enabled": True, "interval": 10, "wait": 40, "cooldown": 1, "patience": 2}
    return SftCurriculumConfig(**{**given, **values})


def told(curriculum: Curriculum, accuracies: list[float], start: int = 0) -> list[tuple[str | None, int]]:
    """Evaluations with these accuracies, EVERY steps apart: what each led to, and the stage after it."""
    out = []
    for number, accuracy in enumerate(accuracies, start + 1):
        event = curriculum.evaluated(number * EVERY, loss=1.0, accuracy=accuracy)
        out.append((event, curriculum.state["stage"]))
    return out


def test_two_good_checks_advance_the_stage_and_start_a_cooldown() -> None:
    curriculum = Curriculum(settings())
    events = told(curriculum, [0.65, 0.5, 0.69, 0.65, 0.65, 0.65, 0.65])
    # Means of three: .65 is one good look, .575 breaks the row, then .613 and .613 are two; one evaluation of
    # cooldown.
    assert events == [(None, 0), (None, 0), (None, 0), ("advance", 1), (None, 1), (None, 1), ("advance", 2)]


def test_a_stage_that_lowers_performance_is_rolled_back_and_tried_later() -> None:
    curriculum = Curriculum(settings())
    events = told(curriculum, [0.65, 0.65, 0.55, *[0.65] * 6])
    assert events[1] == ("advance", 1)
    assert events[2] == ("rollback", 0)
    assert curriculum.state["rollbacks"] == 1
    # 40 steps of rest, and then 20 steps between two looks: at 70 and at 90.
    assert [event for event, _ in events[3:]] == [None] * 5 + ["advance"]
    assert curriculum.state["history"] == [[20, "advance", 1], [30, "rollback", 0], [90, "advance", 1]]


@pytest.mark.parametrize(
    ("accuracy", "loss", "event"),
    [(0.7, 2.0, "advance"), (0.69, 1.0, None), (0.9, 2.1, None), (None, 0.9, None)],
)
def test_a_stage_ends_by_its_own_criteria_when_all_are_measured_and_met(
    accuracy: float, loss: float, event: str | None
) -> None:
    curriculum = Curriculum(settings(threshold=0.99))
    assert curriculum.evaluated(10, loss, accuracy) == event


def test_a_stage_ends_after_its_steps_and_without_accuracy_the_loss_counts() -> None:
    first = StageConfig(name="a", mixture=(1, 0, 0), max_steps=30)
    stages = [first, StageConfig(name="b", mixture=(0, 0, 1))]
    curriculum = Curriculum(settings(stages=stages, drop=1))
    expected = [None, None, "advance", None]
    assert [curriculum.evaluated(step, loss=9.0) for step in (10, 20, 30, 40)] == expected
    # 1 / (1 + 0.6) = .625 is above the threshold, so patience alone decides.
    curriculum = Curriculum(settings())
    assert [curriculum.evaluated(step, loss=0.6) for step in (10, 20)] == [None, "advance"]


def test_an_invalid_mixture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sums to 0\.9"):
        StageConfig(name="a", mixture=(0.5, 0.4, 0.0))


def test_a_resumed_run_with_fewer_stages_stays_in_the_last_of_them() -> None:
    curriculum = Curriculum(settings(patience=1, cooldown=0))
    told(curriculum, [0.65, 0.65])
    assert curriculum.state["stage"] == 2
    fewer = Curriculum(settings(stages=[StageConfig(name="all", mixture=(0.2, 0.3, 0.5))]))
    fewer.load_state_dict(curriculum.state_dict())
    # The evaluation that would have taken stage 2 back: there is none before the only one.
    assert told(fewer, [0.1], start=2) == [(None, 0)]


@given(
    accuracies=st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=60),
    cut=st.integers(0, 60),
    interval=st.integers(1, 40),
    cooldown=st.integers(0, 4),
    patience=st.integers(1, 3),
    drop=st.floats(0, 0.3),
)
def test_any_measurements_keep_the_stage_valid_and_resume_exactly(
    accuracies: list[float | None], cut: int, interval: int, cooldown: int, patience: int, drop: float
) -> None:
    chosen = settings(interval=interval, cooldown=cooldown, patience=patience, drop=drop)
    curriculum, entered = Curriculum(chosen), []
    other = Curriculum(chosen)
    since = math.inf
    for number, accuracy in enumerate(accuracies, 1):
        if number == cut:  # killed, and restored from the JSON of a checkpoint
            state = json.loads(json.dumps(other.state_dict()))
            other = Curriculum(chosen)
            other.load_state_dict(state)
        stage, mixture = curriculum.state["stage"], curriculum.mixture
        event = curriculum.evaluated(number * EVERY, 1.5, accuracy)
        assert other.evaluated(number * EVERY, 1.5, accuracy) == event
        assert other.state_dict() == curriculum.state_dict()
        assert sum(curriculum.mixture) == pytest.approx(1)
        assert 0 <= curriculum.state["stage"] < len(chosen.stages)
        since += 1
        if event == "advance":
            assert since > cooldown
            assert curriculum.state["stage"] == stage + 1
            entered.append(mixture)
            since = 0
        elif event == "rollback":
            assert curriculum.mixture == entered.pop()
        else:
            assert curriculum.mixture == mixture
    events = [event for _, event, _ in curriculum.state["history"]]
    assert curriculum.metrics()["curriculum/rollbacks"] == events.count("rollback")
