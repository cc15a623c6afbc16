"""Properties of packing, advantages and losses for arbitrary sizes and values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pixelis import config
from pixelis.config.presets.algorithms import ALGORITHMS
from pixelis.policy.advantages import batch_advantages
from pixelis.policy.distributed import balanced_shares
from pixelis.policy.losses import Spans, Totals, policy_loss, token_weights
from pixelis.policy.packing import Prompt, pack, segment

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 4)), min_size=1, max_size=40), st.integers(60, 300)
)
def test_packing_with_shared_prompts_is_a_partition_within_capacity(
    drawn: list[tuple[int, int]], capacity: int
):
    sizes = [size for size, _ in drawn]
    prompts = [Prompt(key, min(size, 9 * key)) for size, key in drawn]
    prompts = [Prompt((prompt.key, prompt.length), prompt.length) for prompt in prompts]
    bins = pack(sizes, capacity, prompts)
    assert sorted(i for members in bins for i in members) == list(range(len(sizes)))
    for members in bins:
        held = {prompts[i] for i in members}
        assert sum(sizes[i] - prompts[i].length for i in members) + sum(p.length for p in held) <= capacity


@given(lengths)
@settings(deadline=None)
def test_unpacking_buckets_gives_the_row_back(sizes: list[int]):
    segments = segment(sizes)
    row = torch.arange(sum(sizes))
    assert torch.equal(torch.cat([row[b.reshape(-1)] for b in segments.buckets])[segments.inverse], row)
    assert torch.equal(torch.cat([row[r.rows.view(-1)] for r in segments.runs])[segments.run_inverse], row)


BASELINES = st.sampled_from(["mean", "loo", "pass_at_k"])
REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 1.0]), st.floats(-5, 5))
batches = st.lists(st.lists(REWARDS, max_size=7), max_size=5)


def flat(groups: list[list[float | None]]) -> list[float]:
    return [a for group in groups for a in group if a is not None]


@given(batches, BASELINES, st.floats(-3, 3))
def test_a_baseline_of_the_group_sums_to_zero_and_ignores_a_shift(groups: list, baseline: str, shift: float):
    setting = config.AdvantageConfig(baseline=baseline, scale="none", k=2)
    result = batch_advantages(groups, setting)
    for rewards, advantages in zip(groups, result, strict=True):
        assert [a is None for a in advantages] in ([r is None for r in rewards], [True] * len(rewards))
        assert math.isclose(math.fsum(flat([advantages])), 0, abs_tol=1e-7)
        if sum(r is not None for r in rewards) < 2:
            assert flat([advantages]) == []
    moved = batch_advantages([[None if r is None else r + shift for r in g] for g in groups], setting)
    assert flat(moved) == pytest.approx(flat(result), abs=1e-6)


@given(batches, st.sampled_from(sorted(ALGORITHMS)), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_advantages_follow_their_rollouts_in_any_order(groups: list, name: str, random: object):
    # Which of two equal best rollouts is "the best" is the one thing that depends on the order.
    groups = [list(dict.fromkeys(g)) if name == "second_best" else g for g in groups]
    setting = config.load(None, [f"rft.algorithm={name}"]).rft.advantage
    extra = {"greedy": [0.5] * len(groups), "tokens": [[3] * len(g) for g in groups]}
    result = batch_advantages(groups, setting, **extra)
    orders = [list(range(len(g))) for g in groups]
    for order in orders:
        random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = [[g[i] for i in order] for g, order in zip(groups, orders, strict=True)]
    for row, other, order in zip(result, batch_advantages(shuffled, setting, **extra), orders, strict=True):
        assert [a is None for a in other] == [row[i] is None for i in order]
        assert flat([other]) == pytest.approx(flat([[row[i] for i in order]]), rel=1e-6, abs=1e-6)


@given(
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.sampled_from(sorted(ALGORITHMS)),
    st.sampled_from(["token", "sequence"]),
)
@settings(deadline=None, max_examples=60)
def test_no_algorithm_sees_how_the_batch_is_cut_into_micro_batches(
    seed: int, cuts: int, name: str, level: str
):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (6,), generator=generator)
    sequence = torch.repeat_interleave(torch.arange(6), sizes)
    noise = [torch.randn(int(sizes.sum()), generator=generator) * 0.3 for _ in range(5)]
    new, behaviour, old, reference, entropy = noise
    advantages = torch.randn(6, generator=generator)
    overrides = [f"rft.algorithm={name}", f"rft.loss.importance_level={level}", "rft.loss.entropy=0.01"]
    setting = config.load(None, overrides).rft.loss
    new.requires_grad_()

    def of(members: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch of these sequences, in this order."""
        places = torch.cat([(sequence == m).nonzero()[:, 0] for m in members])
        within = torch.repeat_interleave(torch.arange(len(members)), sizes[members])
        totals = Totals(int(sizes.sum()), 6)
        weights = token_weights(within, sizes[members], setting.aggregate, totals, setting.constant_tokens)
        more = {"old": old[places], "reference": reference[places], "entropy": entropy[places]}
        inputs = new[places], behaviour[places], advantages[members][within], weights, setting
        return policy_loss(*inputs, **more, spans=Spans(within, sizes[members]))[0]

    whole = of(torch.arange(6))
    order = torch.randperm(6, generator=generator)
    cut = sum((of(part) for part in order.chunk(cuts)), torch.zeros(()))
    assert float(cut.detach()) == pytest.approx(float(whole.detach()), rel=1e-4, abs=1e-5)
    (a,), (b,) = torch.autograd.grad(whole, new), torch.autograd.grad(cut, new)
    assert torch.allclose(a, b, atol=1e-5)


@given(st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_no_advantage_no_gradient(seed: int):
    generator = torch.Generator().manual_seed(seed)
    new = torch.randn(9, generator=generator).requires_grad_()
    advantages = torch.randn(9, generator=generator) * (torch.arange(9) % 2)
    behaviour = torch.randn(9, generator=generator)
    loss, _ = policy_loss(new, behaviour, advantages, torch.ones(9), config.LossConfig())
    loss.backward()
    assert (new.grad[::2] == 0).all()


@given(st.lists(st.integers(0, 20_000), max_size=60), st.integers(1, 9))
def test_shares_hold_every_item_once_and_are_balanced(sizes: list[int], workers: int) -> None:
    shares = balanced_shares(sizes, workers)
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in shares)
    sums = [sum(sizes[i] for i in share) for share in shares]
    assert max(sums) <= sum(sizes) / workers + max(sizes, default=0)
    assert len(sizes) < workers or all(shares)
