"""Every named algorithm against its paper's formula, written out sequence by sequence in float64."""

from __future__ import annotations

import itertools
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


def ratio(s: Sequence) -> torch.Tensor:
    return torch.exp(s.new - s.old)


def ppo(ratio: torch.Tensor, a: float, low: float = 0.2, high: float = 0.2) -> torch.Tensor:
    return torch.min(ratio * a, torch.clamp(ratio, 1 - low, 1 + high) * a)


def schulman(s: Sequence) -> torch.Tensor:
    back = torch.exp(s.reference - s.new)
    return back - torch.log(back) - 1


def token_mean(batch: list[Sequence], objective: Callable[[Sequence], torch.Tensor]) -> torch.Tensor:
    """Minus the mean of an objective over all tokens of the batch."""
    return -sum(objective(s).sum() for s in batch) / sum(len(s.new) for s in batch)


def sequence_mean(batch: list[Sequence], objective: Callable[[Sequence], torch.Tensor]) -> torch.Tensor:
    """Minus the mean over rollouts of the mean of an objective over their tokens."""
    return -sum(objective(s).mean() for s in batch) / len(batch)


def clipped(high: float = 0.2, kl: float = 0.0) -> Callable[[list[Sequence]], torch.Tensor]:
    return lambda batch: token_mean(batch, lambda s: ppo(ratio(s), s.advantage, high=high) - kl * schulman(s))


def grpo(batch: list[Sequence]) -> torch.Tensor:
    return sequence_mean(batch, lambda s: ppo(ratio(s), s.advantage) - 0.04 * schulman(s))


def dr_grpo(batch: list[Sequence]) -> torch.Tensor:
    longest = 3 * 32  # max_turns * max_turn_tokens of the default dialogue
    return -sum(ppo(ratio(s), s.advantage).sum() for s in batch) / (longest * len(batch))


def rloo(batch: list[Sequence]) -> torch.Tensor:
    return -sum(s.advantage * s.new.sum() for s in batch) / len(batch)


def reinforce_pp_baseline(batch: list[Sequence]) -> torch.Tensor:
    return token_mean(batch, lambda s: ppo(ratio(s), s.advantage) - 0.01 * (s.new - s.reference) ** 2 / 2)


def likelihood_ratio(s: Sequence) -> torch.Tensor:
    return (torch.exp(s.new.sum()) / torch.exp(s.old.sum())) ** (1 / len(s.new))


def gspo(batch: list[Sequence]) -> torch.Tensor:
    return sequence_mean(batch, lambda s: ppo(likelihood_ratio(s), s.advantage, 3e-4, 4e-4))


def gspo_token(batch: list[Sequence]) -> torch.Tensor:
    def objective(s: Sequence) -> torch.Tensor:
        probability = torch.exp(s.new)
        whole = likelihood_ratio(s).detach() * probability / probability.detach()
        return ppo(whole, s.advantage, 3e-4, 4e-4)

    return sequence_mean(batch, objective)


def cispo(batch: list[Sequence]) -> torch.Tensor:
    def objective(s: Sequence) -> torch.Tensor:
        return torch.exp(s.new.detach() - s.behaviour).clamp(max=5.0) * s.advantage * s.new

    return token_mean(batch, objective)


def sapo(batch: list[Sequence]) -> torch.Tensor:
    def objective(s: Sequence) -> torch.Tensor:
        tau = 1.0 if s.advantage > 0 else 1.05
        return s.advantage * 4 / tau / (1 + torch.exp(-tau * (ratio(s) - 1)))

    return token_mean(batch, objective)


FORMULAS: dict[str, Callable[[list[Sequence]], torch.Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": clipped(0.28),
    "rloo": rloo,
    "ppo": clipped(),
    "reinforce_pp": clipped(),
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": clipped(),
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "pass_at_k": clipped(0.28),
    "second_best": clipped(0.3),
    "pixel_reasoner": clipped(0.35),
    "reason_rft": grpo,
    "r1_v": grpo,
    "ttrl": clipped(kl=0.001),
    "mini_o3": clipped(0.3),
    "deepeyes": clipped(),
    "chain_of_focus": clipped(kl=0.001),
    "pyvision_rl": clipped(),
    "pixelis": clipped(kl=0.001),
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
    totals, constant = Totals(int(sizes.sum()), len(batch)), settings.constant_tokens
    loss, sums = policy_loss(
        new,
        behaviour,
        torch.tensor([s.advantage for s in batch])[sequence],
        token_weights(sequence, sizes, settings.aggregate, totals, constant_tokens=constant),
        settings,
        old=old,
        reference=reference if settings.kl > 0 and settings.kl_in == "loss" else None,
        spans=Spans(sequence, sizes),
    )
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad, sums


def agree(
    batch: list[Sequence], settings: config.LossConfig, expected: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compare with a formula: the loss, and the gradient to 1e-5 of its largest entry; returns ours."""
    loss, gradient, sums = ours(batch, settings)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
    wanted = torch.cat(torch.autograd.grad(expected, [s.new for s in batch]))
    assert float((gradient.double() - wanted).abs().max()) <= 1e-5 * max(1e-3, float(wanted.abs().max()))
    return gradient, sums


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_formula(name: str, seed: int):
    # Its clip range is a thousand times narrower.
    batch = rollouts(seed, spread=1e-3 if name.startswith("gspo") else 0.3)
    settings = named(name, "rft.loss.importance=none").loss
    gradient, sums = agree(batch, settings, FORMULAS[name](batch))
    if settings.surrogate == "clip":
        assert 0 < float(sums["clipped"]) < len(gradient)
        assert float(sums["clipped"]) == float(sums["clipped_low"] + sums["clipped_high"])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("correction", ["truncate", "mask", "none"])
def test_importance_weights_are_those_of_the_formula(level: str, correction: str):
    batch, outside = rollouts(7, 0.3), 0

    def objective(s: Sequence) -> torch.Tensor:
        nonlocal outside
        difference = s.old - s.behaviour
        whole = {"sequence": difference.sum(), "geometric": difference.mean()}.get(level, difference)
        weight = torch.exp(whole).expand(len(s.new))
        is_outside = (weight < 0.7) | (weight > 1.4)
        outside += int(is_outside.sum())
        if correction == "mask":
            weight = torch.where(is_outside, 0.0, weight)
        elif correction == "truncate":
            weight = weight.clamp(0.7, 1.4)
        else:
            weight = torch.ones(len(s.new))
        return weight * ppo(ratio(s), s.advantage, high=0.28)

    keys = {
        "importance": correction,
        "importance_level": level,
        "importance_floor": 0.7,
        "importance_cap": 1.4,
    }
    settings = named("dapo", *(f"rft.loss.{key}={value}" for key, value in keys.items())).loss
    _, sums = agree(batch, settings, token_mean(batch, objective))
    assert 0 < float(sums["importance_capped"]) == outside < sum(len(s.new) for s in batch)


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    batch, bounded = rollouts(3, 1.5), 0

    def objective(s: Sequence) -> torch.Tensor:
        nonlocal bounded
        is_bounded = (ratio(s) > 3.0) & (s.advantage < 0)
        bounded += int(is_bounded.sum())
        return torch.where(is_bounded, 3.0 * s.advantage, ppo(ratio(s), s.advantage, high=0.28))

    settings = named("dapo", "rft.loss.dual_clip=3.0", "rft.loss.importance=none").loss
    _, sums = agree(batch, settings, token_mean(batch, objective))
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
    pairs = zip(itertools.chain(*groups), itertools.chain(*TOKENS), strict=True)
    flat = [value for value, count in pairs for _ in range(count)]
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
    "chain_of_focus": lambda: standard(1e-6),
    "pyvision_rl": centred,
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
        (["rft.loss.surrogate=xyz"], "no surrogate `xyz` (one of clip, cispo, sapo, reinforce, or your own"),
        (["rft.algorithm=pass_at_k", "rft.group_size=4"], "rft.advantage.k 4 is not below rft.group_size 4"),
        (["rft.algorithm=remax", "rft.advantage.scale=std"], "set scale=none or batch_std"),
        (["rft.algorithm=grpo", "rft.advantage.min_group=1"], "compares rollouts of a group"),
        (["rft.algorithm=rloo", "rft.loss.kl_estimator=k3"], "needs kl_estimator=k1"),
        (["rft.algorithm=rloo", "rft.loss.ratio=sequence"], "surrogate reinforce has no ratio"),
        (["rft.algorithm=sapo", "rft.loss.dual_clip=3"], "dual_clip needs surrogate=clip"),
        (["rft.algorithm=dapo", "rft.loss.dual_clip=1.1"], "above 1 + clip_high"),
        (["rft.advantage.baseline=pass_at_k", "rft.advantage.scale=mad"], "cannot be combined with baseline pass_at_k"),
        (["rft.algorithm=ppo", "learner.workers=2", "learner.sequence_parallel=2"], "set learner.sequence_parallel=1"),
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
