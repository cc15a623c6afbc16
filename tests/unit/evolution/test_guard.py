"""The KL guard."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelis.config import GuardConfig
from pixelis.evolution.guard import MAX_BETA, MIN_BETA, MIN_MEASUREMENTS, AdaptiveKLController


def warmed(config: GuardConfig, kl: float) -> AdaptiveKLController:
    beta = AdaptiveKLController(config)
    for _ in range(MIN_MEASUREMENTS - 1):
        assert beta.update(kl) == config.beta
    return beta


@pytest.mark.parametrize(
    ("kl", "after"), [(0.1, 0.012), (0.01, 0.0083), (0.05, 0.01), (0.06, 0.01), (0.04, 0.01)]
)
def test_beta_after_ten_measurements(kl, after):
    assert warmed(GuardConfig(), kl).update(kl) == pytest.approx(after, abs=5e-5)


def test_fixed_beta_stays():
    beta = AdaptiveKLController(GuardConfig(mode="fixed", beta=0.0))
    assert [beta.update(1.0) for _ in range(50)] == [0.0] * 50
    assert beta.mean_kl == pytest.approx(1.0)


@given(st.lists(st.floats(0, 1e6, allow_nan=False), max_size=200), st.floats(0, 10))
def test_beta_never_leaves_its_bounds(measured, start):
    beta = AdaptiveKLController(GuardConfig(beta=start))
    for kl in measured:
        assert MIN_BETA <= beta.update(kl) <= MAX_BETA


def test_no_number_is_no_measurement():
    beta = warmed(GuardConfig(), 0.1)
    beta.update(float("nan"))
    beta.update(float("inf"))
    assert beta.beta == 0.01
    assert beta.update(0.1) == pytest.approx(0.012)


def test_a_restart_goes_on_where_it_was():
    beta = warmed(GuardConfig(), 0.1)
    beta.update(0.1)
    repeated = AdaptiveKLController(GuardConfig())
    repeated.restore(json.loads(json.dumps(beta.state())))
    assert repeated.update(0.1) == beta.update(0.1) == pytest.approx(0.0144)
    fixed = AdaptiveKLController(GuardConfig(mode="fixed", beta=0.3))
    fixed.restore(beta.state())
    assert fixed.beta == 0.3
