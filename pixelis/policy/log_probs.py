"""Log-probabilities of the tokens that the policy wrote, under the distribution that an engine samples from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pixelis.policy.forward import PACKED, Features, VisionLanguageModel, concatenate, encode_views, hidden_states

if TYPE_CHECKING:
    from pixelis.dialogue.spec import ModelSpec
    from pixelis.policy.packing import PackedBatch

CHUNK_VALUES = 2**24
"""Logits held at once: a longer batch passes through the LM head in pieces. Where the head learns, they are computed again in the
backward pass."""
CACHED_VALUES = 2**20
"""Logits of a piece on a CPU: a dozen operations pass over them, which are several times as fast inside the processor's cache."""


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
    most = max(1, chunk_values // len(banned))
    size = min(most, max(64, CACHED_VALUES // len(banned))) if hidden.device.type == "cpu" else most
    weight = getattr(lm_head, "weight", None)
    # A frozen matrix needs no second pass. One with an adapter or a bias is called, as is one that ZeRO-3 gathers at the call.
    plain = type(lm_head) is nn.Linear and lm_head.bias is None and not hasattr(weight, "ds_id")
    if plain and weight is not None and not weight.requires_grad:
        return _FrozenHead.apply(hidden, weight, targets, banned, temperature, smoothing, size, torch.is_grad_enabled())

    def head(h: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_prob, entropy = _TokenLogProbs.apply(lm_head(h), target, banned, temperature, smoothing)
        return log_prob, entropy

    parts = zip(hidden.split(size), targets.split(size), strict=True)
    again = len(targets) > most
    pieces = [checkpoint(head, h, t, use_reentrant=False) if again else head(h, t) for h, t in parts]
    return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])


def _score(
    logits: torch.Tensor, targets: torch.Tensor, banned: torch.Tensor, temperature: float, smoothing: float, slopes: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Logits [M, vocab], which are overwritten -> log-probabilities [M], entropies [M], if asked slopes [M, vocab] of the former.

    The values of `log_softmax` and its gather, in a third of the passes over the logits: the softmax is computed once, serves the
    entropy too, and becomes the slope in place.
    """
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
    allowed = (banned == 0).float()
    allowed /= allowed.sum()
    if smoothing:
        log_prob = (1 - smoothing) * log_prob + smoothing * (scaled @ allowed - log_total)
    entropy = log_total - scaled.mul_(weights).sum(-1) / total
    if not slopes:
        return log_prob, entropy, None
    weights.mul_((-1 / (temperature * total))[:, None])
    if smoothing:
        weights.add_(allowed, alpha=smoothing / temperature)
    weights.scatter_add_(-1, targets[:, None], torch.full_like(total, (1 - smoothing) / temperature)[:, None])
    return log_prob, entropy, weights


class _TokenLogProbs(torch.autograd.Function):
    """`_score` of logits [M, vocab], which are overwritten, as an operation: log-probabilities and entropies [M]."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, banned: torch.Tensor, temperature: float, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_prob, entropy, slopes = _score(logits, targets, banned, temperature, smoothing, ctx.needs_input_grad[0])
        ctx.save_for_backward(slopes)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes.mul_(gradient[:, None]).to(ctx.dtype), None, None, None, None


class _FrozenHead(torch.autograd.Function):
    """Hidden states [M, width] and a frozen LM head [vocab, width] -> log-probabilities and entropies [M].

    Of `size` tokens at a time. The slope of a log-probability by its hidden state does not depend on the loss, so it is computed
    while the logits are there: none are kept, and none are computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        banned: torch.Tensor,
        temperature: float,
        smoothing: float,
        size: int,
        slopes: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropies, by_hidden = [], [], torch.empty_like(hidden) if slopes else None
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            log_prob, entropy, by_logits = _score(
                hidden[part] @ weight.t(), targets[part], banned, temperature, smoothing, slopes
            )
            log_probs.append(log_prob)
            entropies.append(entropy)
            if by_hidden is not None and by_logits is not None:
                torch.mm(by_logits.to(weight.dtype), weight, out=by_hidden[part])
        ctx.save_for_backward(by_hidden)
        out = torch.cat(log_probs), torch.cat(entropies)
        ctx.mark_non_differentiable(out[1])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (by_hidden,) = ctx.saved_tensors
        return (by_hidden * gradient[:, None]).to(by_hidden.dtype), *[None] * 7


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
