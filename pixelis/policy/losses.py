"""SFT and policy losses over the policy tokens of a micro-batch, as functions of log-probabilities.

`tokens` are the policy tokens of a micro-batch, `samples` its sequences. Each token has a weight that
includes the aggregation and the denominator of the *global* batch: summed over micro-batches and workers, the
loss does not depend on how the batch was split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pixelis.config.presets.algorithms import SURROGATES, find_function
from pixelis.errors import BadConfig

if TYPE_CHECKING:
    from pixelis import config

Tokens = Float[Tensor, " tokens"]

SAPO_POSITIVE, SAPO_NEGATIVE = 1.0, 1.05
"""Temperatures of SAPO's soft gate by the sign of the advantage, as in the paper."""
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp, which overflows float32 near 89. Such a token is clipped anyway."""


@dataclass(frozen=True)
class Totals:
    """Denominators of the global batch: policy tokens (for SFT their summed weight) and sequences of all workers."""

    tokens: float
    sequences: int


@dataclass(frozen=True)
class Spans:
    """Assignment of policy tokens to sequences. A sequence is never split over micro-batches.

    sequence: sample index of each policy token; policy_tokens: number of policy tokens of each sample.
    """

    sequence: Int[Tensor, " tokens"]
    policy_tokens: Int[Tensor, " samples"]

    def sum(self, values: Tokens) -> Float[Tensor, " samples"]:
        zeros = torch.zeros(len(self.policy_tokens), dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.sequence, values)

    def mean(self, values: Tokens) -> Tokens:
        return (self.sum(values) / self.policy_tokens.clamp(min=1))[self.sequence]


def token_weights(
    sequence: Int[Tensor, " tokens"],
    policy_tokens: Int[Tensor, " samples"],
    aggregate: Literal["token", "sequence", "constant"],
    totals: Totals,
    constant_tokens: int = 0,
) -> Tokens:
    """Weight of each policy token in the loss.

    `token`: 1 / tokens of the batch (DAPO, arXiv 2503.14476). `sequence`: 1 / (sequences of the batch *
    tokens of its sequence) (GRPO, arXiv 2402.03300). `constant`: 1 / (sequences of the batch *
    constant_tokens) (Dr. GRPO, arXiv 2503.20783).
    """
    if aggregate == "token":
        return torch.full(sequence.shape, 1.0 / totals.tokens, device=sequence.device)
    if aggregate == "constant":
        if constant_tokens < 1:
            raise BadConfig(
                "aggregate=constant needs a length to divide by", fix="set rft.loss.constant_tokens"
            )
        return torch.full(sequence.shape, 1.0 / (totals.sequences * constant_tokens), device=sequence.device)
    return 1.0 / (totals.sequences * policy_tokens[sequence].float())


def sft_loss(new: Tokens, weights: Tokens) -> Float[Tensor, ""]:
    return -(weights * new).sum()


def policy_loss(
    new: Tokens,
    behaviour: Tokens,
    advantages: Tokens,
    weights: Tokens,
    settings: config.LossConfig,
    *,
    old: Tokens | None = None,
    reference: Tokens | None = None,
    divergence: Tokens | None = None,
    entropy: Tokens | None = None,
    spans: Spans | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Policy gradient with importance weights, a KL term and an entropy bonus; returns (loss, metrics).

    new, behaviour, old, reference: log-probabilities under the weights in training, as the engine recorded
    them, under the learner's weights before its first step on this batch, and under the reference policy.
    Without `old` (one step per batch) the ratio is 1 and contributes only its gradient. divergence: of the
    whole distributions, instead of `reference`, for the estimator `full`. entropy: at each token, without
    gradient.

    loss = sum over tokens of weight * (-importance * surrogate + kl * divergence - entropy bonus), where the
    surrogate is a function of ratio = exp(new - old), and importance = exp(old - behaviour) within its
    bounds. Metrics are sums over the tokens, except `*_max`, which are maxima.
    """
    if settings.proximal == "behaviour":
        old = behaviour
    old = new.detach() if old is None else old
    importance, sums = importance_weights(old, behaviour, settings, spans)
    ratio = policy_ratio(new, old, settings, spans)
    gain, clipping = _surrogate(ratio, new, advantages, settings)
    loss = -(weights * importance * gain).sum()
    detached = ratio.detach()
    drift = (new.detach() - behaviour).abs()
    sums |= clipping
    sums |= {
        "ratio": detached.sum(),
        "ratio_max": _largest(detached),
        "ratio_inverse_max": _largest(1 / detached.clamp(min=math.exp(-MAX_LOG_RATIO))),
        "drift": drift.sum(),
        "drift_max": _largest(drift),
        # The behaviour policy sampled the tokens, so this estimates KL(behaviour || learner).
        "approx_kl": k3(new.detach(), behaviour, of_reference=False).sum(),
    }
    if reference is not None:
        divergence = DIVERGENCES[settings.kl_estimator](new, reference)
    if divergence is not None:
        loss = loss + settings.kl * (weights * divergence).sum()
        sums["kl"] = divergence.detach().sum()
    if settings.entropy > 0:
        if entropy is None:
            raise ValueError("the entropy bonus needs entropies")
        loss = loss - settings.entropy * (weights * entropy_bonus(new, entropy)).sum()
    return loss, sums


def metric_names(settings: config.LossConfig, with_reference: bool) -> list[str]:
    """Names of `policy_loss`'s built-in metrics, maxima first, the same for workers without a batch."""
    names = ["drift_max", "ratio_max", "ratio_inverse_max", "importance_max"]
    names += ["importance", "importance_capped", "ratio", "drift", "approx_kl"]
    if settings.surrogate in SURROGATES:
        names += ["clipped", "clipped_low", "clipped_high"]
    return names + ["dual_clipped"] * (settings.dual_clip > 0) + ["kl"] * with_reference


def policy_ratio(
    new: Tokens,
    old: Tokens,
    settings: config.LossConfig,
    spans: Spans | None,
) -> Tokens:
    """pi_new / pi_old of each token, with gradient.

    `sequence`: the geometric mean over the sequence (GSPO, arXiv 2507.18071). `sequence_token`: the same
    value, with the gradient of each token's own log-probability only (GSPO-token, same source).
    """
    if settings.ratio == "token":
        return torch.exp((new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    if spans is None:
        raise ValueError("a sequence-level ratio needs spans")
    ratio = torch.exp(spans.mean(new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    if settings.ratio == "sequence":
        return ratio
    return ratio.detach() * torch.exp(new - new.detach())


def importance_weights(
    old: Tokens,
    behaviour: Tokens,
    settings: config.LossConfig,
    spans: Spans | None,
) -> tuple[Tokens, dict[str, Tensor]]:
    """Corrections for the difference between behaviour policy and learner, without gradient; and metrics.

    pi_old / pi_behaviour of the token, or the product or geometric mean of it over its sequence. A value
    outside of [importance_floor, importance_cap] is clamped (truncated importance sampling, Ionides 2008) or
    set to 0 (`mask`).
    """
    log_ratio = (old - behaviour).detach()
    if settings.importance_level != "token":
        if spans is None:
            raise ValueError("sequence-level importance weights need spans")
        is_product = settings.importance_level == "sequence"
        log_ratio = spans.sum(log_ratio)[spans.sequence] if is_product else spans.mean(log_ratio)
    importance = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    outside = (importance > settings.importance_cap) | (importance < settings.importance_floor)
    sums = {
        "importance": importance.sum(),
        "importance_max": _largest(importance),
        "importance_capped": outside.float().sum(),
    }
    if settings.importance == "none":
        return torch.ones_like(importance), sums
    if settings.importance == "mask":
        return importance.masked_fill(outside, 0.0), sums
    return importance.clamp(settings.importance_floor, settings.importance_cap), sums


Gain = tuple[Tokens, dict[str, Tensor]]
"""Objective to maximise of each token, with gradient, and metrics summed over the tokens."""


def _surrogate(ratio: Tokens, new: Tokens, advantages: Tokens, settings: config.LossConfig) -> Gain:
    """Call the configured surrogate; BadConfig when a user-defined one does not return a Gain."""
    result = find_function("surrogate", settings.surrogate)(ratio, new, advantages, settings)
    if settings.surrogate in SURROGATES:
        return result
    gain, sums = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(gain, torch.Tensor) or gain.shape != new.shape or not isinstance(sums, dict):
        returned = list(gain.shape) if isinstance(gain, torch.Tensor) else type(gain).__name__
        raise BadConfig(
            f"rft.loss.surrogate {settings.surrogate} returned {returned} for {len(new)} tokens",
            fix="return a tensor with one value per token, or a pair of it and a dict of summed metrics",
        )
    if clashes := sums.keys() & {*metric_names(settings, True), "loss", "policy_tokens", "entropy", "nll"}:
        raise BadConfig(
            f"rft.loss.surrogate {settings.surrogate}: the metric {min(clashes)} exists already",
            fix="rename yours",
        )
    return gain, {
        name: torch.as_tensor(value, dtype=new.dtype, device=new.device).detach()
        for name, value in sums.items()
    }


def clip_surrogate(ratio: Tokens, new: Tokens, advantages: Tokens, settings: config.LossConfig) -> Gain:
    """min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), at least dual_clip * A where A < 0.

    PPO clipping as in GRPO (arXiv 2402.03300), asymmetric bounds from DAPO (arXiv 2503.14476), the lower
    bound for tokens with A < 0 that became far more likely from dual-clip PPO (arXiv 1912.09729).
    """
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    is_clipped = gain.detach() < ratio.detach() * advantages
    sums = _clip_metrics(is_clipped & (advantages < 0), is_clipped & (advantages > 0))
    if settings.dual_clip > 0:
        worst = settings.dual_clip * advantages
        is_dual = (advantages < 0) & (gain.detach() < worst)
        sums["dual_clipped"] = is_dual.float().sum()
        gain = torch.where(is_dual, worst, gain)
    return gain, sums


def cispo_surrogate(ratio: Tokens, new: Tokens, advantages: Tokens, settings: config.LossConfig) -> Gain:
    """clip(ratio) * A * log-probability, which keeps clipped tokens' gradient (CISPO, arXiv 2506.13585)."""
    ratio = ratio.detach()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    return ratio.clamp(low, high) * advantages * new, _clip_metrics(ratio < low, ratio > high)


def sapo_surrogate(ratio: Tokens, new: Tokens, advantages: Tokens, settings: config.LossConfig) -> Gain:
    """4 / t * sigmoid(t * (ratio - 1)) * A, t by the sign of A: clipping softly (SAPO, arXiv 2511.20347)."""
    temperature = torch.where(advantages >= 0, SAPO_POSITIVE, SAPO_NEGATIVE)
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return 4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages, _clip_metrics(none, none)


def reinforce_surrogate(ratio: Tokens, new: Tokens, advantages: Tokens, settings: config.LossConfig) -> Gain:
    """A * log-probability (Williams 1992)."""
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return advantages * new, _clip_metrics(none, none)


def _clip_metrics(low: Bool[Tensor, " tokens"], high: Bool[Tensor, " tokens"]) -> dict[str, Tensor]:
    return {
        "clipped": (low | high).float().sum(),
        "clipped_low": low.float().sum(),
        "clipped_high": high.float().sum(),
    }


def _largest(values: Tokens) -> Float[Tensor, ""]:
    return values.max() if len(values) else values.sum()


def k1(new: Tokens, reference: Tokens) -> Tokens:
    """new - ref: an unbiased estimate, but with a gradient of 0 in expectation; for the reward or as a metric."""
    return new - reference


def k2(new: Tokens, reference: Tokens) -> Tokens:
    """(new - ref)^2 / 2: biased, but its gradient on tokens sampled from `new` is that of KL(new || ref)."""
    return 0.5 * (new - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square()


def k3(new: Tokens, other: Tokens, of_reference: bool = True) -> Tokens:
    """exp(d) - d - 1, never negative (Schulman, "Approximating KL divergence").

    of_reference: d = other - new estimates KL(new || other) on tokens sampled from `new`; otherwise d = new -
    other estimates KL(other || new) on tokens sampled from `other`.
    """
    difference = (other - new) if of_reference else (new - other)
    difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def absolute(new: Tokens, reference: Tokens) -> Tokens:
    """|new - ref| (`abs` of verl and EasyR1): an upper bound of |k1| on every token."""
    return (new - reference).abs()


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
"""Estimates from the log-probabilities of the sampled tokens; `full` needs `log_probs.ReferenceStates`."""


def entropy_bonus(new: Tokens, entropy: Tokens) -> Tokens:
    """The entropy, with its own gradient estimated from the sampled token: -(new + entropy) * d new.

    grad H = -E[log p * grad log p], with the entropy as the baseline; no [tokens, vocabulary] tensor is kept.
    """
    entropy = entropy.detach()
    return entropy - (new.detach() + entropy) * (new - new.detach())
