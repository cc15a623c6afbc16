"""The canary: no candidate worse than what serves, no slow drift, no verdict from missing scores."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelis.config import CanaryConfig
from pixelis.evolution.canary import PromotionHistory, accuracy, compare, least_questions

CONFIG = CanaryConfig(tolerance=0.02, risk=1.0)
"""Without a demand for evidence, which the tests of small numbers of questions could not meet."""
CAREFUL = CanaryConfig(tolerance=0.03, risk=0.05)


def scores(right: int, wrong: int, start: int = 0) -> dict[str, float]:
    return {f"q{i}": float(i < right) for i in range(start, right + wrong)}


def test_the_tolerance_is_inclusive():
    assert compare(scores(49, 1), scores(50, 0), CONFIG).promote  # -0.02
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
    assert (noisy.promote, noisy.reason) == (True, "not_worse")
    careful = compare(candidate, reference, CAREFUL)
    assert (careful.promote, careful.reason, careful.fell) == (False, "inconclusive", False)


def test_a_promotion_needs_evidence_of_no_harm():
    # Four answers lost and four won of 256, or of 40: only the former rules out a drop of .03.
    for n, reason in ((256, "not_worse"), (40, "inconclusive")):
        reference, candidate = scores(n - 4, 4), scores(n - 4, 4)
        for i in range(4):
            candidate[f"q{i}"], candidate[f"q{n - 1 - i}"] = 0.0, 1.0
        assert compare(candidate, reference, CAREFUL).reason == reason
    # What changed no answer of few questions is no evidence either.
    least = least_questions(CAREFUL)
    assert compare(scores(least, 0), scores(least, 0), CAREFUL).promote
    assert compare(scores(least - 1, 0), scores(least - 1, 0), CAREFUL).reason == "inconclusive"


def test_questions_that_nobody_answers_right_promote_only_a_better_version():
    """Without the tools of an outside agent the canary would see no fall."""
    nobody, some = scores(4, 764), scores(60, 708)
    blind = compare(nobody, nobody, CAREFUL)
    assert (blind.promote, blind.waits, blind.fell) == (False, True, False)
    assert compare(some, nobody, CAREFUL).promote
    assert compare(some, some, CAREFUL).promote


def test_a_gain_is_named_only_with_evidence():
    # 4 won: the sign test has p = .125
    assert compare(scores(204, 52), scores(200, 56), CAREFUL).reason == "not_worse"
    assert compare(scores(206, 50), scores(200, 56), CAREFUL).reason == "better"


def test_each_look_without_a_promotion_needs_more_evidence():
    history = PromotionHistory(CAREFUL, 0, scores(90, 10))
    wobbling = scores(90, 10)
    wobbling["q0"], wobbling["q99"] = 0.0, 1.0
    decisions = [history.judge_candidate(wobbling) for _ in range(3)]
    assert all(d.reason == "inconclusive" for d in decisions)
    assert decisions[0].bound > decisions[1].bound > decisions[2].bound
    restored = PromotionHistory.restore(CAREFUL, json.loads(json.dumps(history.state())))
    assert restored.judge_candidate(wobbling).bound < decisions[2].bound
    history.promote(1, scores(90, 10))
    assert history.judge_candidate(wobbling).bound == decisions[0].bound


@pytest.mark.parametrize("drop", [0.03, pytest.param(0.05, marks=pytest.mark.long)])
def test_harmful_candidates_are_hardly_ever_promoted(drop: float):
    """Over all candidates of a line in which each dropped by the tolerance or more."""
    generator, lines, won = random.Random(7), 400, 0.01

    def candidate() -> dict[str, float]:
        """0.5 and whole points around it, so that every question may be won and lost."""
        draws = enumerate(generator.random() for _ in range(256))
        return {str(i): 0.5 - (draw < drop + won) + (draw > 1 - won) for i, draw in draws}

    def promotes() -> bool:
        history = PromotionHistory(CAREFUL, 0, dict.fromkeys(map(str, range(256)), 0.5))
        return any(history.judge_candidate(candidate()).promote for _ in range(6))

    assert sum(promotes() for _ in range(lines)) / lines <= CAREFUL.risk + 0.02


def test_standard_error_is_that_of_the_paired_difference():
    decision = compare({"a": 1, "b": 0, "c": 1, "d": 1}, {"a": 0, "b": 1, "c": 0, "d": 1}, CONFIG)
    # differences 1, -1, 1, 0: mean 1/4, variance 11/12
    assert (decision.mean, decision.se) == pytest.approx((0.25, (11 / 12 / 4) ** 0.5))


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


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(20, 200))
def test_slow_drift_is_stopped(seed, count):
    """What serves is never further than the tolerance below the start or the best."""
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
