"""Statistics of ablations: properties of corrections and tests, and results on runs whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_rel

from pixelis.evaluation.ablation import (
    Scores,
    compare,
    detectable,
    holm,
    mean_curve,
    seed_error,
    seed_test,
    tabulate,
)


def runs(
    *probabilities: float, seeds: int = 3, questions: int = 200, spread: float = 0.0, seed: int = 0
) -> Scores:
    """Right or wrong answers of arms with these accuracies, which vary by ``spread`` between seeds."""
    rng = np.random.default_rng(seed)
    values = np.array(
        [[rng.random(questions) < p + rng.normal(0, spread) for _ in range(seeds)] for p in probabilities],
        dtype=float,
    )
    names = tuple(f"arm{i}" for i in range(len(probabilities)))
    return Scores(names, tuple(range(seeds)), tuple(map(str, range(questions))), values)


def test_holm_of_the_textbook() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_identical_arms_do_not_differ() -> None:
    scores = runs(0.5)
    twice = Scores(("a", "b"), scores.seeds, scores.questions, np.concatenate([scores.values, scores.values]))
    (row,) = compare(twice, "a")
    assert (row["difference"], row["effect"], row["p"], row["p_holm"], row["p_seeds"]) == (0, 0, 1, 1, 1)
    assert row["verdict"] == "no difference seen"
    assert detectable(twice) == 0


def test_with_two_arms_the_test_over_seeds_is_the_paired_t_test() -> None:
    scores = runs(0.5, 0.6, seeds=5, spread=0.05)
    a, b = scores.values.mean(axis=2)
    tested = seed_test(scores, "arm1", "arm0")
    expected = ttest_rel(b, a)
    assert tested[0] == pytest.approx(expected.pvalue)
    assert tested[1] == pytest.approx(list(expected.confidence_interval(0.95)))


def test_large_differences_are_named_with_their_direction() -> None:
    better, worse, same = compare(runs(0.5, 0.8, 0.2, 0.5, spread=0.01, seed=1), "arm0")
    assert (better["verdict"], worse["verdict"], same["verdict"]) == ("higher", "lower", "no difference seen")
    assert better["effect"] > 0.3 > -0.3 > worse["effect"]


def test_a_difference_of_one_seed_holds_for_these_runs_only() -> None:
    (row,) = compare(runs(0.5, 0.8, seeds=1), "arm0")
    assert (row["verdict"], row["p_seeds_holm"]) == ("higher in these runs", None)


def test_runs_that_vary_more_than_they_differ_show_nothing_about_the_arms() -> None:
    (row,) = compare(runs(0.4, 0.55, spread=0.2, questions=400, seed=3), "arm0")
    assert row["p_holm"] < 0.05 < row["p_seeds_holm"]
    assert row["verdict"].endswith("in these runs")


@pytest.mark.slow
def test_the_detectable_difference_is_found_as_often_as_promised() -> None:
    """With the true spread of the seeds: of 100 ablations about 80 find a difference of that size."""
    spread, found, false = 0.03, 0, 0
    rng = np.random.default_rng(0)

    def table(shift: float) -> Scores:
        accuracies = 0.5 + rng.normal(0, spread, (2, 4, 1)) + np.array([0, shift])[:, None, None]
        return Scores(("a", "b"), (1, 2, 3, 4), ("q",), accuracies)

    sizes = [(detectable(scores) or 0) / error[0] for scores in (table(0),) if (error := seed_error(scores))]
    size = sizes[0] * spread * (2 / 4) ** 0.5
    for _ in range(2000):
        for shift in (size, 0.0):
            tested = seed_test(table(shift), "b", "a")
            assert tested is not None
            found += shift > 0 and tested[0] <= 0.05
            false += shift == 0 and tested[0] <= 0.05
    assert found / 2000 == pytest.approx(0.8, abs=0.03)
    assert false / 2000 == pytest.approx(0.05, abs=0.02)


def test_only_what_all_arms_have_is_compared() -> None:
    question = {"q1": 1.0, "q2": 0.0, "q3": 1.0}
    table = tabulate(
        {"a": {1: question, 2: question}, "b": {2: {"q1": 0.0, "q3": 1.0, "q4": 1.0}}, "failed": {}}
    )
    assert (table.arms, table.seeds, table.questions) == (("a", "b"), (2,), ("q1", "q3"))
    assert table.values.tolist() == [[[1.0, 1.0]], [[0.0, 1.0]]]
    for hopeless in ({}, {"a": {1: question}, "b": {2: question}}, {"a": {1: {"q1": 1.0}}}):
        with pytest.raises(ValueError, match="scored questions"):
            tabulate(hopeless)


def test_a_curve_has_the_steps_of_all_runs() -> None:
    expected = [(1, 0.5, 0.0, 1.0), (2, 0.75, 0.5, 1.0)]
    assert mean_curve([{1: 0.0, 2: 1.0}, {1: 1.0, 2: 0.5, 3: 1.0}]) == expected
    assert mean_curve([]) == []
