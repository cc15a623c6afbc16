"""The losses, on the policy's tokens only. One screen each, no model in sight.

All take flat tensors over the M policy tokens of a micro-batch and a weight per token. The weights carry the aggregation and the
denominator of the *global* batch, so the sum over micro-batches and workers is the loss of the whole batch, however it is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from pixelis import config

FAR = 20.0
"""Log-ratios are clamped here before exp: a token this far off is clipped anyway, and exp(90) is infinite."""


@dataclass(frozen=True)
class Totals:
    """Denominators of the global batch: policy tokens and sequences over all workers."""

    tokens: int
    sequences: int


def token_weights(
    sequence: torch.Tensor, policy_tokens: torch.Tensor, aggregate: Literal["token", "sequence"], totals: Totals
) -> torch.Tensor:
    """Weight of each policy token, float32 [M].

    `token`: 1 / tokens of the batch (DAPO, arXiv 2503.14476). `sequence`: 1 / (sequences of the batch * tokens of its sequence)
    (GRPO, arXiv 2402.03300). sequence: int64 [M], sample of each token; policy_tokens: int64 [S].
    """
    if aggregate == "token":
        return torch.full(sequence.shape, 1.0 / totals.tokens, device=sequence.device)
    return 1.0 / (totals.sequences * policy_tokens[sequence].float())


def sft_loss(new: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted negative log-likelihood of the demonstrated tokens, a scalar. new, weights: [M]."""
    return -(weights * new).sum()


def policy_loss(
    new: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    settings: config.Loss,
    *,
    old: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped policy gradient with truncated importance weights and an optional KL term; returns (loss, sums of metrics).

    new: log-probabilities under the weights in training; behaviour: those the engine recorded; old: those of the learner before
    this batch's first step (None: one step per batch, so `new` itself, detached: the ratio is 1 and only its gradient counts);
    advantages, weights, reference: one per token. All float [M].

    Per token: min(exp(old - behaviour), importance_cap) * -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
    + kl * k3, ratio = exp(new - old), k3 = exp(ref - new) - (ref - new) - 1. Sources: PPO clipping as in GRPO (arXiv 2402.03300),
    asymmetric bounds from DAPO (arXiv 2503.14476), truncated importance sampling (Ionides 2008), k3 (Schulman 2020).
    """
    old = new.detach() if old is None else old
    ratio = torch.exp((new - old).clamp(-FAR, FAR))
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    importance = torch.exp((old - behaviour).clamp(-FAR, FAR))
    loss = -(weights * importance.clamp(max=settings.importance_cap) * gain).sum()
    drift = (new.detach() - behaviour).abs()
    sums = {
        "clipped": (gain.detach() < ratio.detach() * advantages).float().sum(),
        "importance": importance.sum(),
        "importance_capped": (importance > settings.importance_cap).float().sum(),
        "drift": drift.sum(),
        # The behaviour drew the tokens, so this estimates KL(behaviour || learner).
        "approx_kl": k3(new.detach(), behaviour, of_reference=False).sum(),
    }
    if reference is not None:
        divergence = k3(new, reference)
        loss = loss + settings.kl * (weights * divergence).sum()
        sums["kl"] = divergence.detach().sum()
    return loss, sums


def k3(new: torch.Tensor, other: torch.Tensor, of_reference: bool = True) -> torch.Tensor:
    """exp(d) - d - 1, never negative, an estimate per token of a KL divergence (Schulman, "Approximating KL divergence").

    of_reference: d = other - new estimates KL(new || other) on tokens drawn from `new`; else d = new - other, KL(other || new) on
    tokens drawn from `other`.
    """
    difference = (other - new) if of_reference else (new - other)
    difference = difference.clamp(-FAR, FAR)
    return torch.expm1(difference) - difference
