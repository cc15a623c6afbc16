"""Advantages of trajectories from the rewards of their groups; None for unscored and excluded rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pixelis.config.presets.algorithms import GROUP_BASELINES, find_function
from pixelis.errors import BadConfig, DataFailure

if TYPE_CHECKING:
    from pixelis import config
    from pixelis.records import Group

Values = Sequence[float | None]
Sum = Callable[[list[float]], list[float]]
"""Sums each number over all workers; the identity if one worker holds the whole batch."""
Scored = list[float]


def assign_advantages(
    groups: Sequence[Group],
    settings: config.AdvantageConfig,
    *,
    greedy: Values | None = None,
    kl: Sequence[Values] | None = None,
    kl_weight: float = 0.0,
    sum_workers: Sum = list,
) -> dict[str, float]:
    """Set `advantage` of every trajectory of a batch; returns metrics.

    greedy: reward of a greedy rollout for each group. kl: sum of k1 over each rollout's policy tokens; times
    kl_weight it is subtracted from the reward, as in TRL's RLOO. sum_workers: for shared batches.
    """
    rewards = [group_rewards(group, settings) for group in groups]
    if kl is not None:
        rewards = [
            [None if r is None or k is None else r - kl_weight * k for r, k in zip(group, sums, strict=True)]
            for group, sums in zip(rewards, kl, strict=True)
        ]
    excluded = [[t.stop_reason.value in settings.exclude for t in g.trajectories] for g in groups]
    tokens = [[sum(t.loss_mask()) for t in g.trajectories] for g in groups]
    result = batch_advantages(rewards, settings, greedy=greedy, tokens=tokens, sum_workers=sum_workers)
    for group, advantages, flags in zip(groups, result, excluded, strict=True):
        for trajectory, advantage, is_excluded in zip(group.trajectories, advantages, flags, strict=True):
            trajectory.advantage = None if is_excluded else advantage
    return advantage_metrics([[t.advantage for t in g.trajectories] for g in groups])


def group_rewards(group: Group, settings: config.AdvantageConfig) -> list[float | None]:
    """Rewards for a group's statistics; with `count_excluded` 0 for excluded ones (arXiv 2509.07969)."""
    excluded = 0.0 if settings.count_excluded else None
    return [excluded if t.stop_reason.value in settings.exclude else t.reward for t in group.trajectories]


def usable(rewards: Values, settings: config.AdvantageConfig) -> bool:
    scored = sum(r is not None for r in rewards)
    # With k rollouts there is a single subset of k.
    return scored >= settings.min_group and not (settings.baseline == "pass_at_k" and scored <= settings.k)


def batch_advantages(
    groups: Sequence[Values],
    settings: config.AdvantageConfig,
    *,
    greedy: Values | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    sum_workers: Sum = list,
) -> list[list[float | None]]:
    """(reward - baseline) / (scale + eps) for the groups of a batch.

    None (unscored) stays None; a group is all None if it is not `usable`. Rewards of a group that are equal
    up to rounding give exactly 0.
    """
    if settings.baseline == "greedy" and greedy is None:
        raise BadConfig("baseline greedy needs greedy rollouts", fix="set another rft.advantage.baseline")
    result: list[list[float | None]] = []
    for index, rewards in enumerate(groups):
        if not all(r is None or math.isfinite(r) for r in rewards):
            raise DataFailure("a reward that is not finite reached the advantages", code="non_finite_reward")
        reference = greedy[index] if settings.baseline == "greedy" and greedy is not None else 0.0
        if reference is None or not usable(rewards, settings):
            result.append([None] * len(rewards))
            continue
        scored = iter(_of_group([r - reference for r in rewards if r is not None], settings))
        result.append([None if r is None else next(scored) for r in rewards])
    if settings.baseline != "batch" and settings.scale != "batch_std":
        return result
    return _over_batch(result, settings, tokens if settings.batch_over == "token" else None, sum_workers)


def _of_group(rewards: Scored, settings: config.AdvantageConfig) -> Scored:
    count = len(rewards)
    mean = math.fsum(rewards) / count
    # (n * 0.1) / n is not 0.1: without this check, rounding noise divided by eps would look like a signal.
    if (settings.baseline in GROUP_BASELINES or settings.scale in ("std", "mad")) and (
        max(rewards) - min(rewards) <= 1e-9 * max(1.0, abs(mean))
    ):
        return [0.0] * count
    result = find_function("advantage", settings.baseline)(list(rewards), settings)
    try:
        advantages, deviation = result if isinstance(result, tuple) else (result, None)
        advantages = [float(a) for a in advantages]
        fits = len(advantages) == count and all(map(math.isfinite, [*advantages, deviation or 0.0]))
    except (TypeError, ValueError):  # of a user-defined function
        fits = False
    if not fits:
        message = f"rft.advantage.baseline {settings.baseline} returned {result!r} for the rewards {rewards}"
        fix = "return a finite number for each reward, or a pair of their list and the divisor for scale=std"
        raise BadConfig(message, fix=fix)
    if settings.scale == "std":
        if deviation is None:
            deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (count - 1))
        return [a / (deviation + settings.eps) for a in advantages]
    if settings.scale == "mad":
        # Mean absolute deviation: the median one is 0 if fewer than half of the answers are right.
        divisor = math.fsum(abs(r - mean) for r in rewards) / count + settings.eps
        return [a / divisor for a in advantages]
    return advantages


def no_baseline(rewards: Scored, settings: config.AdvantageConfig) -> Scored:
    return rewards


def group_mean_baseline(rewards: Scored, settings: config.AdvantageConfig) -> Scored:
    """r - mean of the group (GRPO, arXiv 2402.03300)."""
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def leave_one_out_baseline(rewards: Scored, settings: config.AdvantageConfig) -> Scored:
    """r - mean of the others (RLOO, arXiv 2402.14740)."""
    count = len(rewards)
    return [c * count / (count - 1) for c in group_mean_baseline(rewards, settings)]


def second_best(rewards: Scored, settings: config.AdvantageConfig) -> Scored:
    """Lead over the second best reward for the best rollout, 0 for the others (arXiv 2503.19595)."""
    best = max(range(len(rewards)), key=rewards.__getitem__)
    runner_up = max(r for i, r in enumerate(rewards) if i != best)
    return [rewards[best] - runner_up if i == best else 0.0 for i in range(len(rewards))]


def pass_at_k(rewards: Scored, settings: config.AdvantageConfig) -> tuple[Scored, float]:
    """Advantages for the best of `settings.k` attempts, and the deviation of the best, over all k-subsets.

    A_i = mean of max(subset) over the subsets that contain i, minus that over all: for rewards of 0 and 1 the
    advantage of Pass@k training (arXiv 2508.10751), over sorted rewards for any values.
    """
    count, k = len(rewards), settings.k
    order = sorted(range(count), key=rewards.__getitem__)
    ranked = [rewards[i] for i in order]
    subsets, holding = math.comb(count, k), math.comb(count - 1, k - 1)
    # P(the reward of this rank is the best of a subset)
    best = [math.comb(place, k - 1) / subsets for place in range(count)]
    mean = math.fsum(p * r for p, r in zip(best, ranked, strict=True))
    deviation = math.sqrt(math.fsum(p * (r - mean) ** 2 for p, r in zip(best, ranked, strict=True)))
    advantages = [0.0] * count
    above = 0.0  # from subsets that contain this rollout and have a better one
    for place in range(count - 1, -1, -1):
        own = math.comb(place, k - 1) / holding * (ranked[place] - mean)
        advantages[order[place]] = own + above
        if k > 1 and place:
            above += math.comb(place - 1, k - 2) / holding * (ranked[place] - mean)
    return advantages, deviation


def _over_batch(
    groups: list[list[float | None]],
    settings: config.AdvantageConfig,
    tokens: Sequence[Sequence[int]] | None,
    sum_workers: Sum,
) -> list[list[float | None]]:
    """Subtract the batch's mean and, for `batch_std`, divide by its deviation (REINFORCE++, arXiv 2501.03262)."""
    weights = tokens or [[1] * len(group) for group in groups]
    rollouts = [
        pair for group, row in zip(groups, weights, strict=True) for pair in zip(group, row, strict=True)
    ]
    pairs = [(a, w) for a, w in rollouts if a is not None]
    total, weight = sum_workers([math.fsum(a * w for a, w in pairs), float(sum(w for _, w in pairs))])
    mean = total / weight if weight else 0.0
    # Two passes, because the difference of two large sums of squares loses precision.
    (squares,) = sum_workers([math.fsum(w * (a - mean) ** 2 for a, w in pairs)])
    deviation = math.sqrt(squares / max(weight - 1.0, 1.0))
    if deviation <= 1e-9 * max(1.0, abs(mean)):
        return [[None if a is None else 0.0 for a in group] for group in groups]
    divisor = deviation + settings.eps if settings.scale == "batch_std" else 1.0
    return [[None if a is None else (a - mean) / divisor for a in group] for group in groups]


def advantage_metrics(groups: Sequence[Values]) -> dict[str, float]:
    used = [a for group in groups for a in group if a is not None]
    rollouts = sum(len(group) for group in groups)
    return {
        "advantage/dropped_groups": float(sum(all(a is None for a in group) for group in groups)),
        "advantage/silent_groups": float(sum(any(a is not None for a in g) and not any(g) for g in groups)),
        "advantage/left_out": (rollouts - len(used)) / rollouts if rollouts else 0.0,
        "advantage/abs_mean": math.fsum(map(abs, used)) / len(used) if used else 0.0,
        "advantage/max": max(used, default=0.0),
        "advantage/min": min(used, default=0.0),
    }
