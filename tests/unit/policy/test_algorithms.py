"""Every named algorithm against its paper's formula, written out sequence by sequence in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from pixelis import config
from pixelis.config.presets.algorithms import ALGORITHMS
from pixelis.errors import BadConfig
from pixelis.policy.advantages import batch_advantages
from pixelis.policy.losses import Spans, Totals, metric_names, policy_loss, token_weights


@dataclass
class Sequence:
    """One rollout: log-probabilities of its tokens in float64 and its advantage."""

    new: torch.Tensor
    old: torch.Tensor
    behaviour: torch.Tensor
    reference: torch.Tensor
    advantage: float


def rollouts(seed: int, spread: float) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)

    def noise(n: int, size: float) -> torch.Tensor:
        return size * torch.randn(n, generator=generator).double()

    result = []
    for length in torch.randint(1, 12, (9,), generator=generator).tolist():
        old = -noise(length, 1.0).abs() - 0.1
        new = (old + noise(length, spread)).requires_grad_()
        advantage = float(torch.randn((), generator=generator))
        result.append(Sequence(new, old, old + noise(length, 0.3), old + noise(length, 0.2), advantage))
    return result


# -- the formulas --------------------------------------------------------------------------------------------


def ppo(ratio: torch.Tensor, a: float, low: float, high: float) -> torch.Tensor:
    return torch.min(ratio * a, torch.clamp(ratio, 1 - low, 1 + high) * a)


def grpo(batch: list[Sequence], low: float = 0.2, high: float = 0.2, beta: float = 0.04) -> torch.Tensor:
    total = 0.0
    for s in batch:
        objective = 0.0
        for t in range(len(s.new)):
            back = torch.exp(s.reference[t] - s.new[t])
            objective += ppo(torch.exp(s.new[t] - s.old[t]), s.advantage, low, high) - beta * (
                back - torch.log(back) - 1
            )
        total += objective / len(s.new)
    return -total / len(batch)


def token_mean(
    batch: list[Sequence], low: float, high: float, penalty: Callable[[Sequence, int], object] | None = None
):
    total, count = 0.0, 0
    for s in batch:
        for t in range(len(s.new)):
            total += ppo(torch.exp(s.new[t] - s.old[t]), s.advantage, low, high)
            total -= penalty(s, t) if penalty else 0.0
            count += 1
    return -total / count


def schulman(beta: float) -> Callable[[Sequence, int], object]:
    def of(s: Sequence, t: int) -> object:
        back = torch.exp(s.reference[t] - s.new[t])
        return beta * (back - torch.log(back) - 1)

    return of


def dr_grpo(batch: list[Sequence]) -> torch.Tensor:
    longest = 3 * 32  # max_turns * max_turn_tokens of the default dialogue
    total = sum(
        ppo(torch.exp(s.new[t] - s.old[t]), s.advantage, 0.2, 0.2) for s in batch for t in range(len(s.new))
    )
    return -total / (longest * len(batch))


def rloo(batch: list[Sequence]) -> torch.Tensor:
    return -sum(s.advantage * sum(s.new[t] for t in range(len(s.new))) for s in batch) / len(batch)


def gspo(batch: list[Sequence]) -> torch.Tensor:
    total = 0.0
    for s in batch:
        likelihood, before = torch.exp(s.new.sum()), torch.exp(s.old.sum())
        total += ppo((likelihood / before) ** (1 / len(s.new)), s.advantage, 3e-4, 4e-4)
    return -total / len(batch)


def gspo_token(batch: list[Sequence]) -> torch.Tensor:
    total = 0.0
    for s in batch:
        whole = ((torch.exp(s.new.sum()) / torch.exp(s.old.sum())) ** (1 / len(s.new))).detach()
        for t in range(len(s.new)):
            probability = torch.exp(s.new[t])
            total += ppo(whole * probability / probability.detach(), s.advantage, 3e-4, 4e-4) / len(s.new)
    return -total / len(batch)


def cispo(batch: list[Sequence]) -> torch.Tensor:
    total, count = 0.0, 0
    for s in batch:
        for t in range(len(s.new)):
            weight = min(math.exp(float(s.new[t].detach() - s.behaviour[t])), 5.0)
            total += weight * s.advantage * s.new[t]
            count += 1
    return -total / count


def sapo(batch: list[Sequence]) -> torch.Tensor:
    total, count = 0.0, 0
    for s in batch:
        tau = 1.0 if s.advantage > 0 else 1.05
        for t in range(len(s.new)):
            ratio = torch.exp(s.new[t] - s.old[t])
            total += s.advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
            count += 1
    return -total / count


FORMULAS: dict[str, Callable[[list[Sequence]], torch.Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": lambda b: token_mean(b, 0.2, 0.28),
    "rloo": rloo,
    "ppo": lambda b: token_mean(b, 0.2, 0.2),
    "reinforce_pp": lambda b: token_mean(b, 0.2, 0.2),
    "reinforce_pp_baseline": lambda b: token_mean(
        b, 0.2, 0.2, lambda s, t: 0.01 * (s.new[t] - s.reference[t]) ** 2 / 2
    ),
    "remax": lambda b: token_mean(b, 0.2, 0.2),
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "pass_at_k": lambda b: token_mean(b, 0.2, 0.28),
    "second_best": lambda b: token_mean(b, 0.2, 0.3),
    "pixel_reasoner": lambda b: token_mean(b, 0.2, 0.35),
    "reason_rft": grpo,
    "r1_v": grpo,
    "ttrl": lambda b: token_mean(b, 0.2, 0.2, schulman(0.001)),
    "mini_o3": lambda b: token_mean(b, 0.2, 0.3),
    "deepeyes": lambda b: token_mean(b, 0.2, 0.2),
    "pixelis": lambda b: token_mean(b, 0.2, 0.2, schulman(0.001)),
}


def named(name: str, *overrides: str) -> config.RftConfig:
    return config.load(None, [f"rft.algorithm={name}", *overrides]).rft


def ours(
    batch: list[Sequence], settings: config.LossConfig
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradient, metrics) of the implementation on the packed batch in float32."""
    sizes = torch.tensor([len(s.new) for s in batch])
    sequence = torch.repeat_interleave(torch.arange(len(batch)), sizes)
    new = torch.cat([s.new for s in batch]).detach().float().requires_grad_()
    old, behaviour, reference = (
        torch.cat([getattr(s, n) for s in batch]).float() for n in ("old", "behaviour", "reference")
    )
    weights = token_weights(
        sequence,
        sizes,
        settings.aggregate,
        Totals(int(sizes.sum()), len(batch)),
        constant_tokens=settings.constant_tokens,
    )
    loss, sums = policy_loss(
        new,
        behaviour,
        torch.tensor([s.advantage for s in batch])[sequence],
        weights,
        settings,
        old=old,
        reference=reference if settings.kl > 0 and settings.kl_in == "loss" else None,
        spans=Spans(sequence, sizes),
    )
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad, sums


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to 1e-5 of the largest entry."""
    assert float((found.double() - expected).abs().max()) <= 1e-5 * max(1e-3, float(expected.abs().max()))


def test_every_algorithm_has_a_formula_here():
    assert set(FORMULAS) == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_formula(name: str, seed: int):
    # Its clip range is a thousand times narrower.
    batch = rollouts(seed, spread=1e-3 if name.startswith("gspo") else 0.3)
    expected = FORMULAS[name](batch)
    gradients = torch.autograd.grad(expected, [s.new for s in batch])
    settings = named(name, "rft.loss.importance=none").loss
    loss, gradient, sums = ours(batch, settings)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
    agree(gradient, torch.cat(gradients))
    if settings.surrogate == "clip":
        assert 0 < float(sums["clipped"]) < len(gradient)
        assert float(sums["clipped"]) == float(sums["clipped_low"] + sums["clipped_high"])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("correction", ["truncate", "mask", "none"])
def test_importance_weights_are_those_of_the_formula(level: str, correction: str):
    batch = rollouts(7, 0.3)
    low, high = 0.7, 1.4
    total, count, outside = 0.0, 0, 0
    for s in batch:
        for t in range(len(s.new)):
            difference = s.old - s.behaviour
            exponent = {"token": difference[t], "sequence": difference.sum(), "geometric": difference.mean()}[
                level
            ]
            weight = math.exp(float(exponent))
            is_outside = not low <= weight <= high
            outside += is_outside
            if correction == "mask" and is_outside:
                weight = 0.0
            if correction == "truncate":
                weight = min(max(weight, low), high)
            if correction == "none":
                weight = 1.0
            total += weight * ppo(torch.exp(s.new[t] - s.old[t]), s.advantage, 0.2, 0.28)
            count += 1
    expected = -total / count
    gradients = torch.autograd.grad(expected, [s.new for s in batch])
    bounds = (
        f"rft.loss.importance={correction}",
        "rft.loss.importance_floor=0.7",
        "rft.loss.importance_cap=1.4",
    )
    loss, gradient, sums = ours(batch, named("dapo", f"rft.loss.importance_level={level}", *bounds).loss)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    agree(gradient, torch.cat(gradients))
    assert 0 < outside < count
    assert float(sums["importance_capped"]) == outside


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    batch = rollouts(3, 1.5)
    total, count, bounded = 0.0, 0, 0
    for s in batch:
        for t in range(len(s.new)):
            ratio = torch.exp(s.new[t] - s.old[t])
            objective = ppo(ratio, s.advantage, 0.2, 0.28)
            if s.advantage < 0 and float(ratio.detach()) > 3.0:
                objective, bounded = 3.0 * s.advantage + 0 * ratio, bounded + 1
            total += objective
            count += 1
    gradients = torch.autograd.grad(-total / count, [s.new for s in batch])
    loss, gradient, sums = ours(
        batch, named("dapo", "rft.loss.dual_clip=3.0", "rft.loss.importance=none").loss
    )
    assert float(loss) == pytest.approx(float(-total.detach() / count), rel=1e-5)
    agree(gradient, torch.cat(gradients))
    assert float(sums["dual_clipped"]) == bounded > 0


def test_metrics_are_the_same_whether_or_not_a_worker_has_a_batch():
    batch = rollouts(1, 0.3)
    for name in (*ALGORITHMS, "dual"):
        settings = named("dapo", "rft.loss.dual_clip=3").loss if name == "dual" else named(name).loss
        with_reference = settings.kl > 0 and settings.kl_in == "loss"
        assert set(ours(batch, settings)[2]) == set(metric_names(settings, with_reference))


# -- advantages ----------------------------------------------------------------------------------------------

GROUPS = [[1.0, 0.0, 0.5, 0.0, 1.0, 0.25], [0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [0.3, 0.1, 0.2, 0.9, 0.5, 0.4]]
TOKENS = [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8], [9, 7, 9, 3, 2, 3]]
GREEDY = [0.5, 0.0, 1.0]


def sample_std(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def whitened(groups: list[list[float]]) -> list[list[float]]:
    """verl's masked whitening: every token carries its rollout's value; mean and variance are the tokens'."""
    flat = [
        v
        for row, counts in zip(groups, TOKENS, strict=True)
        for v, n in zip(row, counts, strict=True)
        for _ in range(n)
    ]
    mean, std = sum(flat) / len(flat), sample_std(flat)
    return [[(v - mean) / std for v in row] for row in groups]


def standard(eps: float) -> list[list[float]]:
    return [[(r - sum(g) / len(g)) / (sample_std(g) + eps) for r in g] for g in GROUPS]


def centred() -> list[list[float]]:
    return [[r - sum(g) / len(g) for r in g] for g in GROUPS]


def every_subset(k: int, eps: float) -> list[list[float]]:
    """Pass@k by enumeration: a subset's reward is its best, a rollout's the mean over its subsets."""
    out = []
    for g in GROUPS:
        subsets = list(itertools.combinations(range(len(g)), k))
        best = {s: max(g[i] for i in s) for s in subsets}
        mean = sum(best.values()) / len(best)
        std = (sum((b - mean) ** 2 for b in best.values()) / len(best)) ** 0.5
        own = [[best[s] for s in subsets if i in s] for i in range(len(g))]
        out.append([(sum(o) / len(o) - mean) / (std + eps) for o in own])
    return out


def second_best() -> list[list[float]]:
    out = []
    for g in GROUPS:
        first, second = sorted(g, reverse=True)[:2]
        winner = g.index(first)
        out.append([(first - second) / (sample_std(g) + 1e-6) if i == winner else 0.0 for i in range(len(g))])
    return out


ADVANTAGES: dict[str, Callable[[], list[list[float]]]] = {
    "grpo": lambda: standard(1e-4),
    "dr_grpo": centred,
    "dapo": lambda: standard(1e-4),
    "rloo": lambda: [[r - (sum(g) - r) / (len(g) - 1) for r in g] for g in GROUPS],
    "ppo": lambda: whitened(GROUPS),  # the values of the critic come off by token, see test_token_advantages
    "reinforce_pp": lambda: whitened(GROUPS),
    "reinforce_pp_baseline": lambda: whitened(centred()),
    "remax": lambda: [[r - b for r in g] for g, b in zip(GROUPS, GREEDY, strict=True)],
    "gspo": lambda: standard(1e-4),
    "gspo_token": lambda: standard(1e-4),
    "cispo": lambda: standard(1e-4),
    "sapo": lambda: standard(1e-4),
    "pass_at_k": lambda: every_subset(4, 1e-4),
    "second_best": second_best,
    "pixel_reasoner": centred,
    "reason_rft": lambda: standard(1e-4),
    "r1_v": lambda: standard(1e-4),
    "ttrl": lambda: standard(1e-6),
    "mini_o3": lambda: standard(1e-6),
    "deepeyes": lambda: standard(1e-6),
    "pixelis": lambda: standard(1e-4),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_are_those_of_the_formula(name: str):
    result = batch_advantages(GROUPS, named(name).advantage, greedy=GREEDY, tokens=TOKENS)
    for row, expected in zip(result, ADVANTAGES[name](), strict=True):
        assert row == pytest.approx(expected, rel=1e-6, abs=1e-9)


# -- how they are named --------------------------------------------------------------------------------------


def test_the_constant_length_is_that_of_the_dialogue_unless_given():
    c = config.load(None, ["rft.algorithm=dr_grpo", "dialogue.max_turns=5", "dialogue.max_turn_tokens=20"])
    assert c.rft.loss.constant_tokens == 100
    assert named("dr_grpo", "rft.loss.constant_tokens=7").loss.constant_tokens == 7


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rft.algorithm=dapoo"], "did you mean `dapo`"),
        (["rft.algorithm=xyz"], "one of grpo, dr_grpo"),
        (["rft.advantage.baseline=mena"], "rft.advantage.baseline: no baseline `mena` (did you mean `mean`?)"),
        (
            ["rft.loss.surrogate=xyz"],
            "rft.loss.surrogate: no surrogate `xyz` (one of clip, cispo, sapo, reinforce, or your own",
        ),
        (["rft.algorithm=pass_at_k", "rft.group_size=4"], "rft.advantage.k 4 is not below rft.group_size 4"),
        (["rft.algorithm=remax", "rft.advantage.scale=std"], "set scale=none or batch_std"),
        (["rft.algorithm=grpo", "rft.advantage.min_group=1"], "compares rollouts of a group"),
        (["rft.algorithm=rloo", "rft.loss.kl_estimator=k3"], "needs kl_estimator=k1"),
        (["rft.algorithm=rloo", "rft.loss.ratio=sequence"], "surrogate reinforce has no ratio"),
        (["rft.algorithm=sapo", "rft.loss.dual_clip=3"], "dual_clip needs surrogate=clip"),
        (["rft.algorithm=dapo", "rft.loss.dual_clip=1.1"], "above 1 + clip_high"),
        (
            ["rft.advantage.baseline=pass_at_k", "rft.advantage.scale=mad"],
            "scale mad cannot be combined with baseline pass_at_k",
        ),
        (["rft.loss.importance_floor=2.0"], "is not below importance_cap"),
        (["rft.advantage.exclude=[answer]"], "rft.advantage.exclude"),
        (["rft.group_size=1"], "rft.advantage.min_group 2 is above rft.group_size 1"),
    ],
)  # fmt: skip
def test_a_contradiction_is_an_error_that_says_what_to_change(overrides: list[str], told: str):
    with pytest.raises(BadConfig) as caught:
        config.load(None, overrides)
    assert told in str(caught.value)


def test_one_rollout_is_enough_where_no_group_is_compared():
    for name in ("remax", "reinforce_pp"):
        assert named(name, "rft.group_size=1").group_size == 1
