"""The gate's pinned behaviours: learning rates, draws for review, and how often an update may happen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelis.config import EvolutionConfig
from pixelis.evolution.gate import RateLimit, gate, learning_rate, needs_review
from pixelis.records import Verdict
from pixelis.rewards.vote import CLOSED

BY_CONFIDENCE = EvolutionConfig(lr=1e-4, lr_by="confidence")


def passes(threshold: float, confidence: float = 1.0, reason: str = "") -> bool:
    verdict = Verdict(answer="7", confidence=confidence, strategy="majority", reason=reason)
    return gate(verdict, EvolutionConfig(gate=threshold))


def test_accidental_verdicts_never_pass() -> None:
    assert passes(0.0)
    assert not any(passes(0.0, reason=reason) for reason in CLOSED)


@pytest.mark.parametrize(("confidence", "opens"), [(0.7, True), (0.69999, False)])
def test_the_gate_includes_its_threshold(confidence: float, opens: bool) -> None:
    verdict = Verdict(answer="7", confidence=confidence, strategy="majority")
    assert gate(verdict, EvolutionConfig(gate=0.7)) is opens
    assert not gate(verdict, EvolutionConfig(gate=0.7, enabled=False))


def test_rounding_does_not_close_the_gate() -> None:
    product = 0.875 * (0.6 + 0.2 * 0.5) * (0.7 / 0.6125)
    assert passes(0.7, min(product, 0.7 - 1e-16))


def test_learning_rate_by_confidence_is_the_published_one() -> None:
    assert learning_rate(0.9, BY_CONFIDENCE) == pytest.approx(0.1 * 1e-4)
    assert learning_rate(0.1, BY_CONFIDENCE) == pytest.approx(0.9 * 1e-4)
    assert learning_rate(0.9999, BY_CONFIDENCE) >= 1e-6
    assert learning_rate(0.9, EvolutionConfig(lr=1e-4, lr_by="fixed")) == 1e-4


@given(st.floats(0, 1), st.sampled_from(["fixed", "confidence"]))
def test_learning_rate_stays_in_bounds(confidence: float, by: str) -> None:
    config = BY_CONFIDENCE.model_copy(update={"lr_by": by})
    assert 1e-6 <= learning_rate(confidence, config) <= config.lr


def test_the_reviewed_share_is_decided_by_the_id() -> None:
    config = EvolutionConfig(review={"share": 0.02})
    ids = [f"task_{i:016x}" for i in range(1000)]
    reviewed = [needs_review(id, config) for id in ids]
    assert 10 <= sum(reviewed) <= 30
    assert reviewed == [needs_review(id, config) for id in ids]
    assert not any(needs_review(id, EvolutionConfig()) for id in ids)
    assert all(needs_review(id, EvolutionConfig(review={"share": 1.0})) for id in ids)


@given(st.floats(0.2, 20), st.lists(st.floats(0, 30), max_size=80))
def test_no_minute_has_more_than_its_grants(per_minute: float, pauses: list[float]) -> None:
    rate, now, granted = RateLimit(per_minute), 0.0, []
    for pause in pauses:
        now += pause
        wait = rate.wait_s(now)
        if rate.allow(now):
            assert wait == 0
            granted.append(now)
        else:
            assert rate.allow(now + wait + 1e-6)  # what it says to wait is enough
            now += wait + 1e-6
            granted.append(now)
    window = 60.0 if per_minute >= 1 else 60.0 / per_minute
    for start in granted:
        assert sum(start <= t < start + window - 1e-3 for t in granted) <= max(int(per_minute), 1)
