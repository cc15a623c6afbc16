"""Log-probabilities of policy tokens under the distribution that the engines sample from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pixelis.policy.forward import Features, VisionLanguageModel, concatenate, encode_views, packed_hidden_states
from pixelis.policy.lora_linear import LoraLinear
from pixelis.policy.sequence_parallel import SequenceGroup

if TYPE_CHECKING:
    from pixelis.dialogue.spec import ModelSpec
    from pixelis.policy.packing import PackedBatch

CHUNK_VALUES = 2**24
"""Logits in memory at once. Longer batches pass the LM head in chunks; a trainable head recomputes them in the backward pass."""
CACHED_VALUES = 2**20
"""Logits of a chunk on a CPU: about a dozen operations pass over them, several times faster inside the processor's cache."""


def banned_mask(banned: tuple[int, ...], vocab: int, device: torch.device | str | None = None) -> Float[Tensor, " vocab"]:
    """Mask to add to logits: -inf for tokens that must never be sampled, 0 elsewhere."""
    mask = torch.zeros(vocab, device=device)
    mask[list(banned)] = float("-inf")
    return mask


def token_log_probs(
    model: VisionLanguageModel,
    batch: PackedBatch,
    features: Features | None,
    image_token: int,
    banned: Float[Tensor, " vocab"],
    temperature: float = 1.0,
    chunk_values: int = CHUNK_VALUES,
    smoothing: float = 0.0,
    sequence: SequenceGroup | None = None,
    observe: Callable[[Tensor], None] | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-probabilities and entropies (without gradient) of the policy tokens of a packed batch, float32, in row order.

    features: of the batch's distinct views, in order; banned: from `banned_mask`; temperature: the engine's, above 0; smoothing:
    share of each log-probability that is replaced by the mean over the allowed tokens (label smoothing, arXiv 1512.00567).
    Logits are computed only where a policy token is predicted. sequence: the workers that share the row, each of which has its
    part of the batch; all of them get the results of all. observe: called with the hidden states that predict the tokens, unless
    the row is shared.
    """
    if sequence is None or sequence.size == 1:
        predicting = packed_hidden_states(model, batch, features, image_token).index_select(0, batch.previous)
        if observe is not None:
            observe(predicting.detach())
        return project(model.lm_head, predicting, batch.targets, banned, temperature, chunk_values, smoothing)
    hidden = packed_hidden_states(model, batch, features, image_token, sequence=sequence)
    places = batch.previous - sequence.rank * len(hidden)
    own = ((places >= 0) & (places < len(hidden))).nonzero()[:, 0]
    predicting = hidden.index_select(0, places[own])
    results = project(model.lm_head, predicting, batch.targets[own], banned, temperature, chunk_values, smoothing)
    log_probs, entropies = (sequence.gather(values, own, len(places)) for values in results)
    return log_probs, entropies


def project(
    lm_head: nn.Module,
    hidden: Float[Tensor, "tokens width"],
    targets: Int[Tensor, " tokens"],
    banned: Float[Tensor, " vocab"],
    temperature: float = 1.0,
    chunk_values: int = CHUNK_VALUES,
    smoothing: float = 0.0,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-probabilities of `targets` and entropies, from the hidden states that predict them. Calls `lm_head` once."""
    limit = max(1, chunk_values // len(banned))
    size = min(limit, max(64, CACHED_VALUES // len(banned))) if hidden.device.type == "cpu" else limit
    multiply = lm_head.product if isinstance(lm_head, LoraLinear) else lm_head.forward

    def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        weight = getattr(lm_head, "weight", None)
        # A frozen matrix needs no second pass.
        if type(lm_head) is nn.Linear and lm_head.bias is None and weight is not None and not weight.requires_grad:
            return _FrozenHead.apply(hidden, weight, targets, banned, temperature, smoothing, size, torch.is_grad_enabled())

        def head(h: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            log_prob, entropy = _TokenLogProbs.apply(multiply(h), target, banned, temperature, smoothing)
            return log_prob, entropy

        chunks = zip(hidden.split(size), targets.split(size), strict=True)
        recompute = len(targets) > limit
        results = [checkpoint(head, h, t, use_reentrant=False) if recompute else head(h, t) for h, t in chunks]
        return torch.cat([r[0] for r in results]), torch.cat([r[1] for r in results])

    return _inside([m for m in lm_head.modules() if m._parameters], score, hidden, targets)


def _inside(modules: list[nn.Module], function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Call `function` instead of the forward pass of these modules, nested in their hooks.

    ZeRO-3 gathers a module's weights in the hooks of a call. A call for each chunk would gather them as often, and hang where
    workers have different numbers of chunks.
    """
    if not modules:
        return function(*inputs)
    first, *others = modules
    first.forward = functools.partial(_inside, others, function)
    try:
        return first(*inputs)
    finally:
        del first.forward


def _score(
    logits: Float[Tensor, "tokens vocab"],
    targets: Int[Tensor, " tokens"],
    banned: Float[Tensor, " vocab"],
    temperature: float,
    smoothing: float,
    with_gradients: bool,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"], Float[Tensor, "tokens vocab"] | None]:
    """Log-probabilities, entropies and, if requested, gradients of the former by the logits. Overwrites the logits.

    The values of `log_softmax` and a gather in a third of the passes over the logits: the softmax is computed once, used for the
    entropy too, and turned into the gradient in place.
    """
    scaled = logits.float()
    if temperature != 1:
        scaled.div_(temperature)
    # Finite, because 0 * -inf in the entropy would be NaN; the exponential is still 0.
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
    if not with_gradients:
        return log_prob, entropy, None
    weights.mul_((-1 / (temperature * total))[:, None])
    if smoothing:
        weights.add_(allowed, alpha=smoothing / temperature)
    weights.scatter_add_(-1, targets[:, None], torch.full_like(total, (1 - smoothing) / temperature)[:, None])
    return log_prob, entropy, weights


class _TokenLogProbs(torch.autograd.Function):
    """`_score` as an autograd function: logits, which are overwritten, to log-probabilities and entropies."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, banned: Tensor, temperature: float, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        log_prob, entropy, gradients = _score(logits, targets, banned, temperature, smoothing, ctx.needs_input_grad[0])
        ctx.save_for_backward(gradients)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        return gradients.mul_(gradient[:, None]).to(ctx.dtype), None, None, None, None


class _FrozenHead(torch.autograd.Function):
    """Log-probabilities and entropies from hidden states [tokens, width] and a frozen LM head [vocab, width].

    Handles `size` tokens at a time. The gradient of a log-probability by its hidden state does not depend on the loss, so the
    forward pass computes it while the logits exist: logits are neither kept nor recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        banned: Tensor,
        temperature: float,
        smoothing: float,
        size: int,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropies, by_hidden = [], [], torch.empty_like(hidden) if with_gradients else None
        for start in range(0, max(1, len(hidden)), size):
            part = slice(start, start + size)
            log_prob, entropy, by_logits = _score(
                hidden[part] @ weight.t(), targets[part], banned, temperature, smoothing, with_gradients
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
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (by_hidden,) = ctx.saved_tensors
        return (by_hidden * gradient[:, None]).to(by_hidden.dtype), *[None] * 7


class PolicyModule(nn.Module):
    """The module that DeepSpeed wraps: a packed batch to log-probabilities and entropies of its policy tokens."""

    def __init__(
        self,
        model: VisionLanguageModel,
        spec: ModelSpec,
        temperature: float,
        one_pass: bool,
        sequence: SequenceGroup | None = None,
    ):
        super().__init__()
        self.banned: Tensor
        self.sequence = sequence
        self.model, self.spec, self.temperature, self.one_pass = model, spec, temperature, one_pass
        self.chunk_values = CHUNK_VALUES
        self.observe: Callable[[Tensor], None] | None = None
        self.register_buffer("banned", banned_mask(spec.banned, spec.vocab, next(model.parameters()).device), persistent=False)

    def forward(self, batch: PackedBatch, features: Features | None, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """See `token_log_probs`. features: of the batch's distinct views; None runs the vision tower here."""
        if features is None and (views := batch.views or self._blank_views()):
            features = concatenate(encode_views(self.model, self.spec, views, self.one_pass))
        image, t = self.spec.image_token, self.temperature
        chunk = self.chunk_values
        return token_log_probs(self.model, batch, features, image, self.banned, t, chunk, smoothing, self.sequence, self.observe)

    def _blank_views(self) -> list[np.ndarray]:
        """A dummy view for a batch without images, when every worker has to run the vision tower.

        ZeRO-3 requires that, and so does a trainable tower: its gradients are summed over workers that may have images.
        """
        first = next(self.model.model.visual.parameters(), None)
        if first is None or (not self.one_pass and not first.requires_grad):
            return []
        return [np.zeros((self.spec.multiple, self.spec.multiple, 3), dtype=np.uint8)]
