"""The canary: no candidate worse than what serves, no slow drift, no verdict from missing scores."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelis.config import CanaryConfig
from pixelis.evolution.canary import PromotionHistory, accuracy, compare

CONFIG = CanaryConfig(tolerance=0.02, sigma=2.0)


def scores(right: int, wrong: int, start: int = 0) -> dict[str, float]:
    return {f"q{i}": float(i < right) for i in range(start, right + wrong)}


def test_better_and_equal_are_promoted():
    assert compare(scores(90, 38), scores(80, 48), CONFIG).reason == "not_worse"
    equal = compare(scores(80, 48), scores(80, 48), CONFIG)
    assert (equal.promote, equal.reason, equal.mean, equal.se) == (True, "not_worse", 0.0, 0.0)
    assert equal.accuracy == equal.reference_accuracy == 80 / 128
    assert equal.questions == 128


def test_the_tolerance_is_inclusive():
    assert compare(scores(49, 1), scores(50, 0), CONFIG).reason == "within_tolerance"  # -0.02
    fallen = compare(scores(48, 2), scores(50, 0), CONFIG)
    assert (fallen.promote, fallen.reason, fallen.fell) == (False, "fell", True)
    assert fallen.mean == pytest.approx(-0.04)


def test_a_small_but_certain_fall_is_refused():
    # 15 of 1000 lost and none won: -0.015 is within the tolerance and 3.9 standard errors below 0.
    certain = compare(scores(985, 15), scores(1000, 0), CONFIG)
    assert (certain.promote, certain.reason) == (False, "fell_significantly")
    # The same mean with many won and lost is noise.
    candidate, reference = scores(500, 500), scores(515, 485)
    for i in range(100):
        candidate[f"q{i}"], reference[f"q{999 - i}"] = 0.0, 0.0
        candidate[f"q{999 - i}"] = 1.0
    noisy = compare(candidate, reference, CONFIG)
    assert noisy.mean == pytest.approx(-0.015)
    assert (noisy.promote, noisy.reason) == (True, "within_tolerance")


def test_standard_error_is_that_of_the_paired_difference():
    decision = compare({"a": 1, "b": 0, "c": 1, "d": 1}, {"a": 0, "b": 1, "c": 0, "d": 1}, CONFIG)
    # differences 1, -1, 1, 0: mean 1/4, variance 11/12
    assert decision.mean == pytest.approx(0.25)
    assert decision.se == pytest.approx((11 / 12 / 4) ** 0.5)


def test_unscored_questions_are_no_evidence_but_too_many_refuse():
    reference = scores(50, 50)
    candidate: dict[str, float | None] = {**reference}
    for i in range(10):
        candidate[f"q{i}"] = None
    decision = compare(candidate, reference, CONFIG)
    assert (decision.promote, decision.questions) == (True, 90)
    del candidate["q10"]
    decision = compare(candidate, reference, CONFIG)
    assert (decision.promote, decision.reason, decision.fell) == (False, "too_few_questions", False)
    assert not compare({}, {}, CONFIG).promote
    assert not compare({"a": 1.0}, {"a": 1.0}, CONFIG).promote
    assert not compare(scores(9, 1), {f"other{i}": 1.0 for i in range(10)}, CONFIG).promote


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.text(max_size=3), st.sampled_from([0.0, 1.0, 0.5, 0.1]), min_size=2, max_size=60),
    st.floats(0, 1),
    st.floats(0.01, 5),
)
def test_a_candidate_equal_to_its_reference_is_never_refused(answered, tolerance, sigma):
    config = CanaryConfig(tolerance=tolerance, sigma=sigma)
    assert compare(answered, dict(answered), config).promote
    history = PromotionHistory(config, 0, answered)
    assert history.judge_candidate(answered).promote
    assert not history.judge_served(answered).fell


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=60), st.floats(0, 0.5), st.floats(0.01, 5))
def test_a_promoted_candidate_lost_no_more_than_the_tolerance(pairs, tolerance, sigma):
    candidate = {str(i): float(c) for i, (c, _) in enumerate(pairs)}
    reference = {str(i): float(r) for i, (_, r) in enumerate(pairs)}
    decision = compare(candidate, reference, CanaryConfig(tolerance=tolerance, sigma=sigma))
    loss = accuracy(reference) - accuracy(candidate)
    assert decision.promote == (loss <= tolerance + 1e-9 and not decision.fell)
    if loss <= 0:
        assert decision.promote


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(20, 200))
def test_slow_drift_is_stopped(seed, count):
    """However a line of candidates walks, what serves is never further than the tolerance below the start or the best."""
    generator = random.Random(seed)
    served = {str(i): float(generator.random() < 0.8) for i in range(count)}
    history = PromotionHistory(CONFIG, 0, served)
    start, best = accuracy(served), accuracy(served)
    for version in range(1, 60):
        candidate = dict(served)
        for q in generator.sample(sorted(candidate), max(1, count // 50)):
            candidate[q] = float(generator.random() < 0.3)
        if history.judge_candidate(candidate).promote:
            served = candidate
            history.promote(version, served)
            best = max(best, accuracy(served))
        assert accuracy(served) >= start - CONFIG.tolerance - 1e-9
        assert accuracy(served) >= best - CONFIG.tolerance - 1e-9


def test_each_step_within_tolerance_of_the_last_is_not_enough():
    history = PromotionHistory(CONFIG, 0, scores(100, 0))
    assert history.judge_candidate(scores(98, 2)).promote
    history.promote(1, scores(98, 2))
    drifted = scores(96, 4)
    assert compare(drifted, scores(98, 2), CONFIG).promote
    refused = history.judge_candidate(drifted)
    assert (refused.promote, refused.against) == (False, 0)


def test_a_fall_of_the_served_version_is_detected():
    history = PromotionHistory(CONFIG, 0, scores(80, 20))
    history.promote(1, scores(90, 10))
    assert not history.judge_served(scores(90, 10)).fell
    fallen = history.judge_served(scores(82, 18))
    assert (fallen.fell, fallen.against) == (True, 1)
    missing = history.judge_served(dict.fromkeys(scores(90, 10)))
    assert not missing.fell
    history.roll_back(0)
    assert (history.entries[-1][0], history.best[0]) == (0, 0)
    assert not history.judge_served(scores(80, 20)).fell


def test_a_version_promoted_without_a_canary_is_compared_with_its_ancestors():
    history = PromotionHistory(CONFIG, 0, scores(80, 20))
    history.promote(1, None)
    assert history.entries[-1][0] == 1
    assert history.judge_served(scores(60, 40)).fell
    assert not history.judge_served(scores(80, 20)).fell


def test_rollback_to_an_older_and_to_an_unknown_version():
    history = PromotionHistory(CONFIG, 0, scores(80, 20))
    for version in (1, 2, 3):
        history.promote(version, scores(80 + version, 20 - version))
    history.promote(1, scores(81, 19))  # promoted again by a person
    assert (history.entries[-1][0], history.best[0]) == (1, 3)
    history.roll_back(2)
    assert (history.entries[-1][0], history.best[0]) == (2, 2)
    history.roll_back(77)
    assert history.entries[-1][0] == 77
    assert history.judge_served(scores(60, 40)).fell
    assert not history.judge_served(scores(80, 20)).fell


def test_first_best_and_served_survive_many_promotions_and_a_restart():
    history = PromotionHistory(CONFIG, 0, scores(80, 20))
    history.promote(1, scores(82, 18))
    for version in range(2, 200):
        history.promote(version, scores(81, 19))
    assert len(history.entries) < 100
    restored = PromotionHistory.restore(CONFIG, json.loads(json.dumps(history.state())))
    for copy in (history, restored):
        assert (copy.entries[0][0], copy.best[0], copy.entries[-1][0]) == (0, 1, 199)
        assert copy.references() == [(199, scores(81, 19)), (1, scores(82, 18)), (0, scores(80, 20))]
