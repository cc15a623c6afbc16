"""Log-probabilities of the tokens that the policy wrote, under the distribution that an engine samples from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from pixelis.policy.forward import PACKED, Features, VisionLanguageModel, concatenate, encode_views, hidden_states

if TYPE_CHECKING:
    from torch import nn

    from pixelis.dialogue.spec import ModelSpec
    from pixelis.policy.packing import PackedBatch

CHUNK_VALUES = 2**24
"""Logits held at once: a longer batch passes through the LM head in pieces that are computed again in the backward pass."""


def banned_mask(banned: tuple[int, ...], vocab: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Float [vocab] to add to logits: -inf at ids that may never be sampled, 0 elsewhere."""
    mask = torch.zeros(vocab, device=device)
    mask[list(banned)] = float("-inf")
    return mask


def token_log_probs(
    model: VisionLanguageModel,
    batch: PackedBatch,
    features: Features | None,
    image_token: int,
    banned: torch.Tensor,
    temperature: float = 1.0,
    chunk_values: int = CHUNK_VALUES,
    smoothing: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, entropies without gradient) of the M masked-in tokens of a packed batch, float32 [M], in row order.

    features: of the distinct views of the batch, in their order; banned: from `banned_mask`; temperature: the engine's, above 0.
    smoothing: the share of each log-probability that is replaced by the mean over the tokens that may be sampled (label
    smoothing, arXiv 1512.00567). Logits are only computed where a policy token is predicted.
    """
    if features is not None:
        features = features.rows(batch.image_rows)
    # Flash attention finds the samples by the restarting positions; it knows no other argument.
    ours = model.model.language_model.config._attn_implementation == PACKED
    extra = {"segments": batch.segments} if ours else {}
    hidden = hidden_states(model, batch.tokens[None], batch.positions[:, None], features, image_token, use_cache=False, **extra)[
        0
    ]
    before = hidden.index_select(0, batch.previous)
    return project(model.lm_head, before, batch.tokens[batch.mask], banned, temperature, chunk_values, smoothing)


def project(
    lm_head: nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    banned: torch.Tensor,
    temperature: float = 1.0,
    chunk_values: int = CHUNK_VALUES,
    smoothing: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `targets` [M] and entropies [M] from the hidden states that predict them, [M, width]."""

    def head(h: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_prob, entropy = _TokenLogProbs.apply(lm_head(h), target, banned, temperature, smoothing)
        return log_prob, entropy

    size = max(1, chunk_values // len(banned))
    if len(targets) <= size:
        return head(hidden, targets)
    pieces = [checkpoint(head, h, t, use_reentrant=False) for h, t in zip(hidden.split(size), targets.split(size), strict=True)]
    return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])


class _TokenLogProbs(torch.autograd.Function):
    """Logits [M, vocab], which are overwritten -> log-probabilities and entropies [M].

    The values of `log_softmax` and its gather, in a third of the passes over the logits: the softmax is computed once, serves the
    entropy too, and becomes the gradient in place.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, banned: torch.Tensor, temperature: float, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits.float()
        if temperature != 1:
            scaled.div_(temperature)
        # Finite, as 0 * -inf in the entropy would be NaN; the exponential is 0 all the same.
        scaled.add_(banned.clamp(min=-1e30))
        scaled.sub_(scaled.amax(-1, keepdim=True))
        weights = scaled.exp()
        total = weights.sum(-1)
        log_total = total.log()
        log_prob = scaled.gather(-1, targets[:, None])[:, 0] - log_total + banned[targets]
        if smoothing:
            allowed = (banned == 0).float()
            allowed /= allowed.sum()
            log_prob = (1 - smoothing) * log_prob + smoothing * (scaled @ allowed - log_total)
            ctx.allowed = allowed
        entropy = log_total - scaled.mul_(weights).sum(-1) / total
        ctx.save_for_backward(weights, total, targets)
        ctx.temperature, ctx.dtype, ctx.smoothing = temperature, logits.dtype, smoothing
        ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weights, total, targets = ctx.saved_tensors
        gradient = gradient / ctx.temperature
        weights.mul_((-gradient / total)[:, None])
        if ctx.smoothing:
            weights.addr_(ctx.smoothing * gradient, ctx.allowed)
        weights.scatter_add_(-1, targets[:, None], ((1 - ctx.smoothing) * gradient)[:, None])
        return weights.to(ctx.dtype), None, None, None, None


class PolicyModule(torch.nn.Module):
    """What DeepSpeed wraps: packed batch -> (log-probabilities, entropies) of its policy tokens."""

    def __init__(self, model: VisionLanguageModel, spec: ModelSpec, temperature: float, one_pass: bool):
        super().__init__()
        self.banned: torch.Tensor
        self.model, self.spec, self.temperature, self.one_pass = model, spec, temperature, one_pass
        self.register_buffer("banned", banned_mask(spec.banned, spec.vocab, next(model.parameters()).device), persistent=False)

    def forward(self, batch: PackedBatch, features: Features | None, smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """features: of the batch's distinct views; None when the vision tower has to run here. smoothing: of the labels."""
        if features is None and (views := batch.views or self._blank()):
            features = concatenate(encode_views(self.model, self.spec, views, self.one_pass))
        image, t = self.spec.image_token, self.temperature
        return token_log_probs(self.model, batch, features, image, self.banned, t, smoothing=smoothing)

    def _blank(self) -> list[np.ndarray]:
        """For a batch of text alone: a view whose features nobody reads, where all workers have to be in the vision tower.

        That is so under ZeRO-3, and when the tower learns: its gradients are summed over workers that may have seen pictures.
        """
        if not self.one_pass and not next(self.model.model.visual.parameters()).requires_grad:
            return []
        return [np.zeros((self.spec.multiple, self.spec.multiple, 3), dtype=np.uint8)]
