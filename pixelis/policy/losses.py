"""The losses, on the policy's tokens only: a switchboard of small functions, no model in sight.

All take flat tensors over the M policy tokens of a micro-batch and a weight per token. The weights carry the aggregation and the
denominator of the *global* batch, so the sum over micro-batches and workers is the loss of the whole batch, however it is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from pixelis.config.presets.algorithms import SURROGATES, find_function
from pixelis.errors import BadConfig

if TYPE_CHECKING:
    from pixelis import config

FAR = 20.0
"""Log-ratios are clamped here before exp: a token this far off is clipped anyway, and exp(90) is infinite."""


@dataclass(frozen=True)
class Totals:
    """Denominators of the global batch: policy tokens (in `sft` what they count together) and sequences over all workers."""

    tokens: float
    sequences: int


@dataclass(frozen=True)
class Spans:
    """Which tokens of a micro-batch belong together. A sequence is never cut over micro-batches.

    sequence: int64 [M], sample of each policy token; policy_tokens: int64 [S], how many each sample has.
    """

    sequence: torch.Tensor
    policy_tokens: torch.Tensor

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of each sequence: [M] -> [S]."""
        zeros = torch.zeros(len(self.policy_tokens), dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.sequence, values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of each sequence, given back to its tokens: [M] -> [M]."""
        return (self.sum(values) / self.policy_tokens.clamp(min=1))[self.sequence]


def token_weights(
    sequence: torch.Tensor,
    policy_tokens: torch.Tensor,
    aggregate: Literal["token", "sequence", "constant"],
    totals: Totals,
    constant_tokens: int = 0,
) -> torch.Tensor:
    """Weight of each policy token, float32 [M].

    `token`: 1 / tokens of the batch (DAPO, arXiv 2503.14476). `sequence`: 1 / (sequences of the batch * tokens of its sequence)
    (GRPO, arXiv 2402.03300). `constant`: 1 / (sequences of the batch * constant_tokens) (Dr. GRPO, arXiv 2503.20783).
    sequence: int64 [M], sample of each token; policy_tokens: int64 [S].
    """
    if aggregate == "token":
        return torch.full(sequence.shape, 1.0 / totals.tokens, device=sequence.device)
    if aggregate == "constant":
        if constant_tokens < 1:
            raise BadConfig("aggregate=constant divides by a length that is not set", fix="set rft.loss.constant_tokens")
        return torch.full(sequence.shape, 1.0 / (totals.sequences * constant_tokens), device=sequence.device)
    return 1.0 / (totals.sequences * policy_tokens[sequence].float())


def sft_loss(new: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted negative log-likelihood of the demonstrated tokens, a scalar. new, weights: [M]."""
    return -(weights * new).sum()


def policy_loss(
    new: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    settings: config.LossConfig,
    *,
    old: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    spans: Spans | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy gradient with importance weights, a KL term and an entropy bonus; returns (loss, metrics).

    new: log-probabilities under the weights in training; behaviour: those the engine recorded; old: those of the learner before
    this batch's first step (None: one step per batch, so `new` itself, detached: the ratio is 1 and only its gradient counts);
    advantages, weights, reference: one per token; entropy: of the distribution at each token, no gradient needed. All float [M].
    spans: needed by everything at the level of sequences.

    loss = sum over tokens of weight * (-importance * surrogate + kl * divergence - entropy bonus), where the surrogate is the
    function named in the settings over ratio = exp(new - old) and importance = exp(old - behaviour) within its bounds. Masked
    tokens stay in the denominators. Metrics are sums over the tokens, but for those named `*_max`, largest values.
    """
    if settings.proximal == "behaviour":
        old = behaviour
    old = new.detach() if old is None else old
    importance, sums = importance_weights(old, behaviour, settings, spans)
    ratio = policy_ratio(new, old, settings, spans)
    gain, clipping = _surrogate(ratio, new, advantages, settings)
    loss = -(weights * importance * gain).sum()
    distance = ratio.detach()
    drift = (new.detach() - behaviour).abs()
    sums |= clipping
    sums |= {
        "ratio": distance.sum(),
        "ratio_max": _largest(distance),
        "ratio_inverse_max": _largest(1 / distance.clamp(min=math.exp(-FAR))),
        "drift": drift.sum(),
        "drift_max": _largest(drift),
        # The behaviour drew the tokens, so this estimates KL(behaviour || learner).
        "approx_kl": k3(new.detach(), behaviour, of_reference=False).sum(),
    }
    if reference is not None:
        divergence = DIVERGENCES[settings.kl_estimator](new, reference)
        loss = loss + settings.kl * (weights * divergence).sum()
        sums["kl"] = divergence.detach().sum()
    if settings.entropy > 0:
        if entropy is None:
            raise ValueError("the entropy bonus needs the entropies")
        loss = loss - settings.entropy * (weights * entropy_bonus(new, entropy)).sum()
    return loss, sums


def metric_names(settings: config.LossConfig, with_reference: bool) -> list[str]:
    """The metrics that `policy_loss` returns, largest values first: workers without a batch report the same ones.

    Those of a user's own surrogate are not among them.
    """
    names = ["drift_max", "ratio_max", "ratio_inverse_max", "importance_max"]
    names += ["importance", "importance_capped", "ratio", "drift", "approx_kl"]
    if settings.surrogate in SURROGATES:
        names += ["clipped", "clipped_low", "clipped_high"]
    return names + ["dual_clipped"] * (settings.dual_clip > 0) + ["kl"] * with_reference


def policy_ratio(new: torch.Tensor, old: torch.Tensor, settings: config.LossConfig, spans: Spans | None) -> torch.Tensor:
    """pi_new / pi_old of each token, [M] with gradient.

    `sequence`: the geometric mean over the sequence, the same for all its tokens (GSPO, arXiv 2507.18071). `sequence_token`: that
    value, but each token has the gradient of its own log-probability only (GSPO-token, same source).
    """
    if settings.ratio == "token":
        return torch.exp((new - old).clamp(-FAR, FAR))
    if spans is None:
        raise ValueError("a ratio of sequences needs the spans")
    ratio = torch.exp(spans.mean(new - old).clamp(-FAR, FAR))
    if settings.ratio == "sequence":
        return ratio
    return ratio.detach() * torch.exp(new - new.detach())


def importance_weights(
    old: torch.Tensor, behaviour: torch.Tensor, settings: config.LossConfig, spans: Spans | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weights that correct for tokens the learner itself would have drawn with another probability, [M] without gradient.

    pi_old / pi_behaviour of the token, the product over its sequence or the geometric mean of it. Outside of
    [importance_floor, importance_cap] it is cut to the bound (truncated importance sampling, Ionides 2008) or 0 (masked).
    """
    log_ratio = (old - behaviour).detach()
    if settings.importance_level != "token":
        if spans is None:
            raise ValueError("importance weights of sequences need the spans")
        whole = settings.importance_level == "sequence"
        log_ratio = spans.sum(log_ratio)[spans.sequence] if whole else spans.mean(log_ratio)
    importance = torch.exp(log_ratio.clamp(-FAR, FAR))
    outside = (importance > settings.importance_cap) | (importance < settings.importance_floor)
    sums = {"importance": importance.sum(), "importance_max": _largest(importance), "importance_capped": outside.float().sum()}
    if settings.importance == "none":
        return torch.ones_like(importance), sums
    if settings.importance == "mask":
        return importance.masked_fill(outside, 0.0), sums
    return importance.clamp(settings.importance_floor, settings.importance_cap), sums


Gain = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""What to maximise per token, [M] with gradient, and sums of metrics over the tokens."""


def _surrogate(ratio: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, settings: config.LossConfig) -> Gain:
    """What the surrogate function returns. Raises BadConfig for one of a user's own that returns something else than a Gain."""
    result = find_function("surrogate", settings.surrogate)(ratio, new, advantages, settings)
    if settings.surrogate in SURROGATES:
        return result
    gain, sums = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(gain, torch.Tensor) or gain.shape != new.shape or not isinstance(sums, dict):
        returned = list(gain.shape) if isinstance(gain, torch.Tensor) else type(gain).__name__
        raise BadConfig(
            f"rft.loss.surrogate {settings.surrogate} returned {returned} for {len(new)} tokens",
            fix="return a tensor with one value for each token, or a pair of it and a dict of sums of metrics",
        )
    if taken := sums.keys() & {*metric_names(settings, True), "loss", "policy_tokens", "entropy", "nll"}:
        raise BadConfig(f"rft.loss.surrogate {settings.surrogate}: a metric is called {min(taken)} already", fix="rename yours")
    return gain, {name: torch.as_tensor(value, dtype=new.dtype, device=new.device).detach() for name, value in sums.items()}


def clip_surrogate(ratio: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, settings: config.LossConfig) -> Gain:
    """min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), at least dual_clip * A where A < 0.

    PPO clipping as in GRPO (arXiv 2402.03300), asymmetric bounds from DAPO (arXiv 2503.14476), the bound on bad tokens that
    became far more likely from dual-clip PPO (arXiv 1912.09729).
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


def cispo_surrogate(ratio: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, settings: config.LossConfig) -> Gain:
    """clip(ratio) * A * log-probability with the weight held fixed: a clipped token still learns (arXiv 2506.13585)."""
    ratio = ratio.detach()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    return ratio.clamp(low, high) * advantages * new, _clip_metrics(ratio < low, ratio > high)


def sapo_surrogate(ratio: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, settings: config.LossConfig) -> Gain:
    """4 / t * sigmoid(t * (ratio - 1)) * A, t by the sign of A: clipping made soft (arXiv 2511.20347). Its slope at 1 is 1."""
    temperature = torch.where(advantages >= 0, settings.sapo_positive, settings.sapo_negative)
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return 4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages, _clip_metrics(none, none)


def reinforce_surrogate(ratio: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, settings: config.LossConfig) -> Gain:
    """A * log-probability (Williams 1992)."""
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return advantages * new, _clip_metrics(none, none)


def _clip_metrics(low: torch.Tensor, high: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"clipped": (low | high).float().sum(), "clipped_low": low.float().sum(), "clipped_high": high.float().sum()}


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.max() if len(values) else values.sum()


def k1(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """new - ref: without bias as a number, but its gradient is 0 in expectation. Meant for the reward, or to watch."""
    return new - reference


def k2(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """(new - ref)^2 / 2: biased as a number; on tokens drawn from `new` its gradient is that of KL(new || ref)."""
    return 0.5 * (new - reference).clamp(-FAR, FAR).square()


def k3(new: torch.Tensor, other: torch.Tensor, of_reference: bool = True) -> torch.Tensor:
    """exp(d) - d - 1, never negative, an estimate per token of a KL divergence (Schulman, "Approximating KL divergence").

    of_reference: d = other - new estimates KL(new || other) on tokens drawn from `new`; else d = new - other, KL(other || new) on
    tokens drawn from `other`.
    """
    difference = (other - new) if of_reference else (new - other)
    difference = difference.clamp(-FAR, FAR)
    return torch.expm1(difference) - difference


DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def entropy_bonus(new: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """The entropy as value, with the gradient -(new + entropy) * d new: that of the entropy, estimated on the drawn token.

    grad H = -E[log p * grad log p]; the entropy itself serves as the baseline. So no [tokens, vocabulary] tensor has to be kept.
    """
    entropy = entropy.detach()
    return entropy - (new.detach() + entropy) * (new - new.detach())
