"""Properties of packing, advantages and losses for arbitrary sizes and values."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelis import config
from pixelis.policy.advantages import group_advantages
from pixelis.policy.losses import Totals, policy_loss, token_weights
from pixelis.policy.packing import pack, segment

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)
rewards = st.lists(st.one_of(st.none(), st.floats(-5, 5)), max_size=12)


@given(lengths, st.integers(60, 300))
def test_packing_is_a_partition_within_capacity(sizes: list[int], capacity: int):
    bins = pack(sizes, capacity)
    assert sorted(i for members in bins for i in members) == list(range(len(sizes)))
    assert all(0 < sum(sizes[i] for i in members) <= capacity for members in bins)
    # First-fit decreasing: at most one bin is half empty or less.
    assert sum(2 * sum(sizes[i] for i in members) <= capacity for members in bins) <= 1


@given(lengths)
@settings(deadline=None)
def test_unpacking_buckets_gives_the_row_back(sizes: list[int]):
    segments = segment(sizes)
    row = torch.arange(sum(sizes))
    assert torch.equal(torch.cat([row[b.reshape(-1)] for b in segments.buckets])[segments.inverse], row)


@given(rewards, st.floats(-3, 3))
def test_advantages_sum_to_zero_and_ignore_a_shift(values: list[float | None], shift: float):
    setting = config.Advantage(scale="none")
    found = group_advantages(values, setting)
    used = [a for a in found if a is not None]
    assert len(found) == len(values)
    assert math.isclose(math.fsum(used), 0, abs_tol=1e-7)
    moved = group_advantages([None if v is None else v + shift for v in values], setting)
    assert [a is None for a in moved] == [a is None for a in found]
    for a, b in zip(found, moved, strict=True):
        assert a is None or math.isclose(a, b, abs_tol=1e-6)


@given(rewards)
def test_scaled_advantages_are_bounded_and_ordered_like_rewards(values: list[float | None]):
    found = group_advantages(values, config.Advantage())
    scored = sorted((v, a) for v, a in zip(values, found, strict=True) if v is not None and a is not None)
    assert all(x[1] <= y[1] + 1e-9 for x, y in itertools.pairwise(scored))
    assert all(abs(a) <= math.sqrt(len(scored)) for _, a in scored)


@given(st.integers(1, 6), st.integers(0, 2**31), st.sampled_from(["token", "sequence"]))
@settings(deadline=None, max_examples=40)
def test_the_loss_does_not_depend_on_how_the_batch_is_cut(cuts: int, seed: int, aggregate: str):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (6,), generator=generator)
    total = int(sizes.sum())
    sequence = torch.repeat_interleave(torch.arange(6), sizes)
    new, behaviour, reference, advantages = (torch.randn(total, generator=generator) for _ in range(4))
    weights = token_weights(sequence, sizes, aggregate, Totals(total, 6))
    setting = config.Loss(kl=0.1, aggregate=aggregate)
    parts = [sequence % cuts == i for i in range(cuts)]
    whole, _ = policy_loss(new, behaviour, advantages, weights, setting, reference=reference)
    cut = sum(policy_loss(new[p], behaviour[p], advantages[p], weights[p], setting, reference=reference[p])[0] for p in parts)
    assert float(cut) == pytest.approx(float(whole), rel=1e-4, abs=1e-4)
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-5)


@given(st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_no_advantage_no_gradient(seed: int):
    generator = torch.Generator().manual_seed(seed)
    new = torch.randn(9, generator=generator).requires_grad_()
    advantages = torch.randn(9, generator=generator) * (torch.arange(9) % 2)
    loss, _ = policy_loss(new, torch.randn(9, generator=generator), advantages, torch.ones(9), config.Loss())
    loss.backward()
    assert (new.grad[::2] == 0).all()
