"""Advantages of tokens: returns with a KL penalty at each token, and GAE with a critic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32

if TYPE_CHECKING:
    from pixelis import config
    from pixelis.policy.samples import TrainSample
    from pixelis.policy.train_step import Trainer

Tokens = Float32[np.ndarray, " tokens"]


def token_returns(
    reward: float, penalties: Tokens, values: Tokens | None, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns) of the policy tokens of a rollout, float64. penalties: subtracted at each token.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, R_t = A_t + V_t (GAE, arXiv
    1506.02438); without a critic's values both are the discounted returns (REINFORCE++, arXiv 2501.03262).
    """
    rewards = -penalties.astype(np.float64)
    rewards[-1] += reward
    v = np.zeros(len(rewards)) if values is None else values.astype(np.float64)
    decay = gamma * (1.0 if values is None else lam)
    deltas = rewards + gamma * np.append(v[1:], 0.0) - v if values is not None else rewards
    advantages, following = np.empty(len(rewards)), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        advantages[t] = following = deltas[t] + decay * following
    return advantages, advantages + v


def whitened(
    rows: Sequence[np.ndarray], eps: float, total: Callable[[list[float]], list[float]]
) -> list[np.ndarray]:
    """The values less their mean, divided by their deviation over all workers' tokens."""
    values = np.concatenate(rows) if rows else np.empty(0)
    count, summed = total([float(len(values)), float(values.sum())])
    mean = summed / count if count else 0.0
    (squares,) = total([float(np.square(values - mean).sum())])
    deviation = math.sqrt(squares / max(count - 1.0, 1.0))
    scale = 0.0 if deviation <= 1e-9 * max(1.0, abs(mean)) else 1.0 / (deviation + eps)
    return [(row - mean) * scale for row in rows]


def assign_token_advantages(
    trainer: Trainer,
    samples: Sequence[TrainSample],
    rewards: Sequence[float],
    settings: config.AdvantageConfig,
) -> dict[str, float]:
    """Set the token advantages of this worker's samples, and with a critic values and returns. Collective."""
    in_reward = trainer.loss.kl_in == "reward" and trainer.loss.kl > 0
    penalties = (
        trainer.model.token_kl(samples)
        if in_reward
        else [np.zeros(s.policy_tokens, np.float32) for s in samples]
    )
    weight = trainer.rft.kl_coefficient
    values = trainer.model.values(samples) if trainer.model.critic is not None else None
    rows, chosen = [], []
    for index, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        v = values[index] if values is not None else None
        if (
            not sample.policy_tokens
            or len(penalties[index]) != sample.policy_tokens
            or (v is not None and len(v) == 0)
        ):
            continue
        advantages, returns = token_returns(
            reward, weight * penalties[index], v, settings.gamma, settings.lam
        )
        if v is not None:
            sample.values, sample.returns = v, returns.astype(np.float32)
        rows.append(advantages)
        chosen.append(sample)
    total = trainer.model.sequence.sum
    if settings.scale == "batch_std":
        rows = whitened(rows, settings.eps, total)
    for sample, row in zip(chosen, rows, strict=True):
        sample.token_advantages = row.astype(np.float32)
    metrics = _spread(rows, total)
    kl = np.concatenate(penalties) if in_reward and penalties else np.zeros(0)
    divergence, kl_tokens = total([float(kl.sum(dtype=np.float64)), float(len(kl))])
    if in_reward and kl_tokens:
        metrics["policy/kl_in_reward"] = divergence / kl_tokens
        trainer.rft.adapt_kl(divergence / kl_tokens)
    return metrics | _critic_metrics(chosen, total)


def add_teacher_advantages(
    samples: Sequence[TrainSample],
    teacher: Sequence[Tokens | None],
    weight: float,
    total: Callable[..., list[float]],
) -> dict[str, float]:
    """Add weight * (log p_teacher - log p_behaviour) to the advantage of each policy token.

    In expectation over the policy's own tokens this is the gradient of its reverse KL to the teacher at each
    token (GKD, arXiv 2306.13649; Thinking Machines, "On-policy distillation", 2025). teacher: its
    log-probabilities of each sample's policy tokens; None leaves the sample's advantage as it is.
    """
    rows, gaps = [], [np.zeros(0)]
    for sample, log_probs in zip(samples, teacher, strict=True):
        row = np.full(sample.policy_tokens, sample.advantage, np.float64)
        if sample.token_advantages is not None:
            row = sample.token_advantages.astype(np.float64)
        if log_probs is not None:
            gaps.append(log_probs.astype(np.float64) - sample.log_probs[sample.mask])
            row = row + weight * gaps[-1]
        sample.token_advantages = row.astype(np.float32)
        rows.append(row)
    gap = np.concatenate(gaps)
    difference, tokens = total([float(gap.sum()), float(len(gap))])
    return _spread(rows, total) | {"teacher/kl": -difference / max(tokens, 1.0)}


def _spread(rows: Sequence[np.ndarray], total: Callable[..., list[float]]) -> dict[str, float]:
    """Extremes and mean size of the advantages of all workers' tokens."""
    flat = np.concatenate(rows) if rows else np.zeros(0)
    largest, smallest, size, count = total(
        [
            float(flat.max(initial=0.0)),
            float((-flat).max(initial=0.0)),
            float(np.abs(flat).sum()),
            float(len(flat)),
        ],
        largest=2,
    )
    return {
        "advantage/max": largest,
        "advantage/min": -smallest,
        "advantage/abs_mean": size / count if count else 0.0,
    }


def _critic_metrics(
    samples: Sequence[TrainSample], total: Callable[[list[float]], list[float]]
) -> dict[str, float]:
    """Mean value and return, and the share of the returns' variance that the critic explains."""
    pairs = [(s.values, s.returns) for s in samples if s.values is not None and s.returns is not None]
    v = np.concatenate([a for a, _ in pairs]).astype(np.float64) if pairs else np.empty(0)
    r = np.concatenate([b for _, b in pairs]).astype(np.float64) if pairs else np.empty(0)
    e = r - v
    names = [len(v), v.sum(), r.sum(), np.square(r).sum(), e.sum(), np.square(e).sum()]
    count, values, returns, squares, errors, squared_errors = total([float(x) for x in names])
    if not count:
        return {}
    variance, rest = squares / count - (returns / count) ** 2, squared_errors / count - (errors / count) ** 2
    explained = 1.0 - rest / variance if variance > 1e-12 else 0.0
    return {
        "critic/value": values / count,
        "critic/return": returns / count,
        "critic/explained_variance": explained,
    }
