"""Intervals against closed forms and simulations; differences pair by question."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pixelis.evaluation.statistics import bootstrap_mean, compare, paired_bootstrap, paired_p, wilson


def test_wilson_at_the_edges():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 20)[0] == pytest.approx(0.0, abs=1e-12)
    assert wilson(20, 20)[1] == pytest.approx(1.0)
    assert 0.8 < wilson(20, 20)[0] < 0.9


def test_bootstrap_agrees_with_the_normal_interval_for_many_values():
    values = np.random.default_rng(0).normal(2.0, 3.0, size=2000)
    low, high = bootstrap_mean(values, seed=1)
    half = 1.96 * values.std(ddof=1) / 2000**0.5
    assert low == pytest.approx(values.mean() - half, abs=0.02)
    assert high == pytest.approx(values.mean() + half, abs=0.02)


def test_pairing_removes_shared_difficulty_of_questions():
    rng = np.random.default_rng(3)
    hardness = rng.random(300)
    a, b = hardness + 0.1 + rng.normal(0, 0.01, 300), hardness
    result = paired_bootstrap(a, b)
    assert result["mean"] == pytest.approx(0.1, abs=0.005)
    low, high = result["ci95"]
    assert 0.09 < low < high < 0.11  # unpaired, the questions' spread alone is wider than this


def test_mappings_pair_by_question_and_keep_only_shared_ones():
    result = paired_bootstrap(
        {"q1": 1.0, "q2": 1.0, "q3": 0.0, "only_a": 1.0}, {"q3": 0.0, "q2": 0.0, "q1": 1.0, "only_b": 0.0}
    )
    assert result["n"] == 3
    assert result["mean"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("a", "b"), [([1, 2], [1]), ([1], [0]), ({"q": 1.0}, {"p": 1.0})])
def test_unpaired_results_are_refused(a, b):
    with pytest.raises(ValueError):
        paired_bootstrap(a, b)


def test_paired_p_is_mcnemars_exact_test_for_right_or_wrong_scores_and_counts_signs_for_others():
    assert paired_p([1, 1, 1, 1, 1, -1, 0, 0]) == pytest.approx(2 * 7 / 64)
    assert paired_p([0, 0, 0]) == 1.0
    differences = [0.1, 0.2, 0.3, 0.4]
    signs = itertools.product((1, -1), repeat=4)
    sums = [abs(sum(s * d for s, d in zip(sign, differences, strict=True))) for sign in signs]
    assert paired_p(differences) == pytest.approx(sum(total >= 1.0 - 1e-9 for total in sums) / 16)


def test_a_comparison_needs_two_shared_questions():
    assert compare({"a": 1.0, "b": 0.0}, {"b": 0.0, "c": 1.0}) is None
    pair = compare({"a": 1.0, "b": 1.0, "x": 0.0}, {"a": 0.0, "b": 1.0})
    assert (pair["mean"], pair["n"], pair["p"]) == (0.5, 2, 1.0)
