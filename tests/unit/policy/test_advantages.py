"""Advantages: the group's, the batch's, and who is left out."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from rewarded import group

from pixelis.config import AdvantageConfig
from pixelis.errors import BadConfig, DataFailure
from pixelis.policy.advantages import assign_advantages, batch_advantages, group_rewards, usable
from pixelis.records import Group, StopReason

WHITEN = AdvantageConfig(baseline="none", scale="batch_std", eps=1e-12, min_group=1)


def group_advantages(
    rewards: list[float | None], settings: AdvantageConfig, greedy: float | None = None
) -> list[float | None]:
    return batch_advantages([rewards], settings, greedy=[greedy])[0]


def advantages_of(g: Group) -> list[float | None]:
    return [t.advantage for t in g.trajectories]


def test_equal_rewards_give_no_signal_at_all():
    for reward in (0.0, 0.1, 0.7, 1e6):
        assert group_advantages([reward] * 7, AdvantageConfig()) == [0.0] * 7
    noisy = [0.1 + 0.2, 0.3, 0.15 + 0.15]
    assert group_advantages(noisy, AdvantageConfig()) == [0.0] * 3


def test_unscored_rollouts_neither_count_nor_get_an_advantage():
    assert group_advantages([1.0, None, 0.0], AdvantageConfig(scale="none")) == [0.5, None, -0.5]


def test_too_small_a_group_is_not_used():
    assert group_advantages([1.0, None, None], AdvantageConfig()) == [None] * 3
    assert group_advantages([1.0, 0.0, None], AdvantageConfig(min_group=3)) == [None] * 3
    assert group_advantages([], AdvantageConfig()) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(bad: float):
    with pytest.raises(DataFailure, match="reached the advantages"):
        group_advantages([1.0, bad], AdvantageConfig())


def test_mean_absolute_deviation_is_not_zero_for_lopsided_groups():
    result = group_advantages([1.0, 0.0, 0.0, 0.0], AdvantageConfig(scale="mad", eps=1e-12))
    assert result == pytest.approx([2.0, -2 / 3, -2 / 3, -2 / 3])


def test_greedy_baseline_needs_a_greedy_reward_and_drops_a_group_whose_is_unscored():
    setting = AdvantageConfig(baseline="greedy", scale="none", min_group=1)
    expected = [[0.5, None, -0.5], [None], [0.0]]
    assert batch_advantages([[1.0, None, 0.0], [1.0], [0.5]], setting, greedy=[0.5, None, 0.5]) == expected
    assert group_advantages([1.0], setting, greedy=0.25) == [0.75]
    assert group_advantages([1.0], setting) == [None]
    with pytest.raises(BadConfig, match="greedy"):
        batch_advantages([[1.0]], setting)


def test_a_batch_on_several_workers_has_the_statistics_of_the_whole():
    parts: list[list[list[float | None]]] = [[[1.0, 0.0, 2.0], [5.0, 1.0]], [[None, 3.0, 0.5]], []]
    barrier, sent = threading.Barrier(len(parts)), [[0.0]] * len(parts)

    def worker(rank: int) -> list[list[float | None]]:
        def all_reduce(values: list[float]) -> list[float]:
            sent[rank] = values
            barrier.wait(timeout=10)
            total = [math.fsum(column) for column in zip(*sent, strict=True)]
            barrier.wait(timeout=10)
            return total

        return batch_advantages(parts[rank], WHITEN, sum_workers=all_reduce)

    with ThreadPoolExecutor(len(parts)) as pool:
        result = [a for part in pool.map(worker, range(len(parts))) for g in part for a in g]
    whole = [a for g in batch_advantages([g for part in parts for g in part], WHITEN) for a in g]
    assert result == pytest.approx(whole)


def test_pass_at_k_needs_more_than_k_scored_rollouts():
    setting = AdvantageConfig(baseline="pass_at_k", k=2)
    assert group_advantages([1.0, 0.0, None], setting) == [None] * 3
    assert not usable([1.0, 0.0, None], setting)
    assert usable([1.0, 0.0, 0.0], setting)


def test_an_excluded_rollout_is_out_of_statistics_and_loss():
    cut = {2: StopReason.OVER_TURN}
    setting = AdvantageConfig(scale="none", exclude=["over_turn"])
    metrics = assign_advantages([g := group([1.0, 0.0, 0.0], cut)], setting)
    assert advantages_of(g) == [0.5, -0.5, None]
    assert metrics["advantage/left_out"] == pytest.approx(1 / 3)
    # Mini-o3's code: out of the loss, but the others are measured against its zero.
    leaky = setting.model_copy(update={"count_excluded": True})
    assign_advantages([g := group([1.0, 0.0, 0.7], cut)], leaky)
    assert advantages_of(g) == pytest.approx([2 / 3, -1 / 3, None])
    assert group_rewards(g, leaky) == [1.0, 0.0, 0.0]


def test_a_batch_is_assigned_and_its_dropped_groups_are_counted():
    groups = [group([1.0, 0.0]), group([1.0, None]), group([0.5, 0.5]), group([])]
    metrics = assign_advantages(groups, AdvantageConfig(scale="none"))
    assert [advantages_of(g) for g in groups] == [[0.5, -0.5], [None, None], [0.0, 0.0], []]
    assert metrics["advantage/dropped_groups"] == 2
    assert metrics["advantage/silent_groups"] == 1
    assert metrics["advantage/abs_mean"] == 0.25
    assert (metrics["advantage/min"], metrics["advantage/max"]) == (-0.5, 0.5)


def test_divergence_comes_off_the_reward_before_anything_is_compared():
    g = group([1.0, None, 1.0, 0.0])
    assign_advantages(
        [g], AdvantageConfig(baseline="loo", scale="none"), kl=[[2.0, 9.0, 6.0, None]], kl_weight=0.1
    )
    assert advantages_of(g) == pytest.approx([0.4, None, -0.4, None])
