"""Group-relative advantages."""

from __future__ import annotations

import pytest

from pixelis.config import Advantage
from pixelis.errors import DataFailure
from pixelis.policy.advantages import group_advantages


def test_grpo_subtracts_the_mean_and_divides_by_the_sample_deviation():
    found = group_advantages([1.0, 0.0, 0.0, 1.0], Advantage(eps=1e-9))
    assert found == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254])


def test_dr_grpo_leaves_the_deviation_out():
    assert group_advantages([1.0, 0.0], Advantage(scale="none")) == [0.5, -0.5]


def test_without_a_baseline_the_reward_itself_is_scaled():
    assert group_advantages([2.0, 2.0], Advantage(baseline="none", scale="none")) == [2.0, 2.0]


def test_equal_rewards_give_no_signal_at_all():
    for reward in (0.0, 0.1, 0.7, 1e6):
        assert group_advantages([reward] * 7, Advantage()) == [0.0] * 7
    noisy = [0.1 + 0.2, 0.3, 0.15 + 0.15]
    assert group_advantages(noisy, Advantage()) == [0.0] * 3


def test_unscored_rollouts_neither_count_nor_get_an_advantage():
    assert group_advantages([1.0, None, 0.0], Advantage(scale="none")) == [0.5, None, -0.5]


def test_too_small_a_group_is_not_used():
    assert group_advantages([1.0, None, None], Advantage()) == [None] * 3
    assert group_advantages([1.0, 0.0, None], Advantage(min_group=3)) == [None] * 3
    assert group_advantages([], Advantage()) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(bad: float):
    with pytest.raises(DataFailure, match="reached the advantages"):
        group_advantages([1.0, bad], Advantage())
