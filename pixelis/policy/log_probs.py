"""Log-probabilities of policy tokens under the distribution that the engines sample from, except for `top_p`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pixelis.families.capped_head import CappedHead
from pixelis.families.features import Features, concatenate
from pixelis.policy.adapters import is_vision
from pixelis.policy.forward import VisionLanguageModel, packed_hidden_states
from pixelis.policy.lora_linear import LoraLinear
from pixelis.policy.sequence_parallel import SequenceGroup

if TYPE_CHECKING:
    from pixelis.families.family import ModelSpec
    from pixelis.policy.packing import PackedBatch

Tokens = Float[Tensor, " tokens"]
Logits = Float[Tensor, "tokens vocab"]
Vocabulary = Float[Tensor, " vocab"]

CHUNK_VALUES = 2**24
"""Logits in memory at once. A trainable LM head recomputes further chunks in the backward pass."""
CACHED_VALUES = 2**20
"""Logits of a chunk on a CPU, where a chunk that fits the cache is several times faster."""


@dataclass(frozen=True)
class ReferenceStates:
    """The reference's predicting hidden states, which are smaller than its distributions.

    head: values of the LM head's trainable parameters.
    """

    hidden: Float[Tensor, "tokens width"]
    head: Sequence[Tensor] = ()

    def to(self, device: torch.device | str) -> ReferenceStates:
        return ReferenceStates(self.hidden.to(device), self.head)


def banned_mask(banned: tuple[int, ...], vocab: int, device: torch.device | str | None = None) -> Vocabulary:
    """Mask to add to logits: -inf for tokens that must never be sampled."""
    mask = torch.zeros(vocab, device=device)
    mask[list(banned)] = float("-inf")
    return mask


def token_log_probs(
    model: VisionLanguageModel,
    spec: ModelSpec,
    batch: PackedBatch,
    features: Features | None,
    banned: Vocabulary,
    temperature: float = 1.0,
    chunk_values: int = CHUNK_VALUES,
    smoothing: float = 0.0,
    sequence: SequenceGroup | None = None,
    observe: Callable[[Tensor], None] | None = None,
    reference: ReferenceStates | None = None,
) -> tuple[Tokens, ...]:
    """Log-probabilities and entropies (without gradient) of a packed batch's policy tokens, float32.

    smoothing: share of each log-probability replaced by the mean over the allowed tokens (arXiv 1512.00567);
    sequence: the workers that share the row; observe: gets the predicting hidden states; reference: adds
    KL(policy || reference) over the vocabulary.
    """
    predicting, own = predicting_states(model, spec, batch, features, sequence)
    if observe is not None and own is None:
        observe(predicting.detach())
    targets = batch.targets if own is None else batch.targets[own]
    results = project(
        model.lm_head, predicting, targets, banned, temperature, chunk_values, smoothing, reference
    )
    if sequence is None or own is None:
        return results
    return tuple(sequence.gather(values, own, len(batch.targets)) for values in results)


def predicting_states(
    model: VisionLanguageModel,
    spec: ModelSpec,
    batch: PackedBatch,
    features: Features | None,
    sequence: SequenceGroup | None = None,
) -> tuple[Float[Tensor, "own width"], Int[Tensor, " own"] | None]:
    """Hidden states that predict the policy tokens, and which these are if workers share the row."""
    if sequence is None or sequence.size == 1:
        return packed_hidden_states(model, spec, batch, features).index_select(0, batch.previous), None
    hidden = packed_hidden_states(model, spec, batch, features, sequence=sequence)
    places = batch.previous - sequence.rank * len(hidden)
    own = ((places >= 0) & (places < len(hidden))).nonzero()[:, 0]
    return hidden.index_select(0, places[own]), own


def project(
    lm_head: nn.Module,
    hidden: Float[Tensor, "tokens width"],
    targets: Int[Tensor, " tokens"],
    banned: Vocabulary,
    temperature: float = 1.0,
    chunk_values: int = CHUNK_VALUES,
    smoothing: float = 0.0,
    reference: ReferenceStates | None = None,
) -> tuple[Tokens, ...]:
    """Log-probabilities of `targets`, entropies and, with a reference, KL divergences. Calls `lm_head` once."""
    limit = max(1, chunk_values // len(banned))
    size = min(limit, max(64, CACHED_VALUES // len(banned))) if hidden.device.type == "cpu" else limit
    multiply = lm_head.product if isinstance(lm_head, LoraLinear) else lm_head.forward
    others = (reference.hidden,) if reference is not None else ()

    def score(hidden: Tensor, targets: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        weight = getattr(lm_head, "weight", None)
        # A frozen matrix needs no second pass.
        if (
            type(lm_head) in (nn.Linear, CappedHead)
            and lm_head.bias is None
            and weight is not None
            and not weight.requires_grad
        ):
            learns = torch.is_grad_enabled()
            cap = getattr(lm_head, "cap", None)
            return _FrozenHead.apply(
                hidden, weight, cap, targets, banned, temperature, smoothing, size, learns, *others
            )

        def head(h: Tensor, target: Tensor, *other: Tensor) -> tuple[Tensor, ...]:
            other_logits = None
            if other and reference is not None:
                with torch.no_grad(), _parameters_of(lm_head, reference.head):
                    other_logits = multiply(other[0])
            return _TokenLogProbs.apply(multiply(h), target, banned, temperature, smoothing, other_logits)

        chunks = zip(*(values.split(size) for values in (hidden, targets, *others)), strict=True)
        recompute = len(targets) > limit
        results = [
            checkpoint(head, *chunk, use_reentrant=False) if recompute else head(*chunk) for chunk in chunks
        ]
        return tuple(torch.cat(values) for values in zip(*results, strict=True))

    return _inside([m for m in lm_head.modules() if m._parameters], score, hidden, targets, *others)


@contextmanager
def _parameters_of(lm_head: nn.Module, values: Sequence[Tensor]) -> Iterator[None]:
    """Give an LM head other values of its trainable parameters, and no dropout."""
    parameters = [p for p in lm_head.parameters() if p.requires_grad] if values else []
    own, is_training = [p.data for p in parameters], lm_head.training
    try:
        lm_head.train(False)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        yield
    finally:
        for parameter, value in zip(parameters, own, strict=True):
            parameter.data = value
        lm_head.train(is_training)


def _inside(modules: list[nn.Module], function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Call `function` instead of the forward pass of these modules, nested in their hooks.

    ZeRO-3 gathers weights in a call's hooks: once, instead of for each chunk, of which workers may have
    different numbers.
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
    logits: Logits,
    targets: Int[Tensor, " tokens"],
    banned: Vocabulary,
    temperature: float,
    smoothing: float,
    with_gradients: bool,
) -> tuple[Tokens, Tokens, Logits | None]:
    """Log-probabilities, entropies and d log-probability / d logits from one softmax, in place of the logits."""
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


def _divergence(
    logits: Logits,
    reference: Logits,
    banned: Vocabulary,
    temperature: float,
    with_gradients: bool,
) -> tuple[Tokens, Logits | None]:
    """KL(policy || reference) = sum p (log p - log q); its gradient by the logits is p (log p - log q - KL) / T."""
    # Finite for banned tokens, as in `_score`; their differences are 0.
    log_p, log_q = (
        torch.log_softmax(values.float() / temperature + banned.clamp(min=-1e30), -1)
        for values in (logits, reference)
    )
    ratio = log_p - log_q
    p = log_p.exp_()
    divergence = (p * ratio).sum(-1)
    if not with_gradients:
        return divergence, None
    return divergence, p.mul_(ratio.sub_(divergence[:, None])).div_(temperature)


def _scores(
    logits: Tensor,
    targets: Tensor,
    banned: Tensor,
    temperature: float,
    smoothing: float,
    with_gradients: bool,
    reference: Tensor | None = None,
) -> tuple[Tensor, list[tuple[Tensor, Tensor | None]]]:
    divergence = (
        [_divergence(logits, reference, banned, temperature, with_gradients)] if reference is not None else []
    )
    log_prob, entropy, gradient = _score(logits, targets, banned, temperature, smoothing, with_gradients)
    return entropy, [(log_prob, gradient), *divergence]


class _TokenLogProbs(torch.autograd.Function):
    """`_scores` as an autograd function of the policy's logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        banned: Tensor,
        temperature: float,
        smoothing: float,
        reference: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        learns, ctx.dtype = ctx.needs_input_grad[0], logits.dtype
        entropy, scored = _scores(logits, targets, banned, temperature, smoothing, learns, reference)
        ctx.save_for_backward(*(by_logits for _, by_logits in scored))
        ctx.mark_non_differentiable(entropy)
        log_prob, *divergences = (values for values, _ in scored)
        return log_prob, entropy, *divergences

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, (gradient, *others), strict=True)
        total, *further = (by_logits.mul_(g[:, None]) for by_logits, g in pairs)
        for part in further:
            total.add_(part)
        return total.to(ctx.dtype), *[None] * 5


class _FrozenHead(torch.autograd.Function):
    """`_scores` as an autograd function of hidden states and a frozen LM head, `size` tokens at a time.

    The gradient of a log-probability by its hidden state does not depend on the loss, so it is computed while
    the logits exist; they are neither kept nor recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        cap: float | None,
        targets: Tensor,
        banned: Tensor,
        temperature: float,
        smoothing: float,
        size: int,
        with_gradients: bool,
        reference: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        # Each with the gradient by the hidden states, or None.
        results: list[tuple[list[Tensor], Tensor | None]] = []
        entropies = []
        for start in range(0, max(1, len(hidden)), size):
            part = slice(start, start + size)
            logits, slope = _capped(hidden[part] @ weight.t(), cap)
            others = _capped(reference[part] @ weight.t(), cap)[0] if reference is not None else None
            entropy, scored = _scores(
                logits, targets[part], banned, temperature, smoothing, with_gradients, others
            )
            entropies.append(entropy)
            if not results:
                results = [([], torch.empty_like(hidden) if with_gradients else None) for _ in scored]
            for (values, by_hidden), (value, gradient) in zip(results, scored, strict=True):
                values.append(value)
                if by_hidden is not None and gradient is not None:
                    if slope is not None:
                        gradient.mul_(slope)
                    torch.mm(gradient.to(weight.dtype), weight, out=by_hidden[part])
        ctx.save_for_backward(*(by_hidden for _, by_hidden in results))
        log_probs, *divergences = (torch.cat(values) for values, _ in results)
        out = torch.cat(entropies)
        ctx.mark_non_differentiable(out)
        return log_probs, out, *divergences

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, (gradient, *others), strict=True)
        total = sum((by_hidden * g[:, None]).to(by_hidden.dtype) for by_hidden, g in pairs)
        return total, *[None] * 9


def _capped(logits: Logits, cap: float | None) -> tuple[Logits, Logits | None]:
    """Logits as of `CappedHead`, and their derivative by those without a cap."""
    if cap is None:
        return logits, None
    share = torch.tanh(logits / cap)
    return cap * share, 1 - share**2


class PolicyModule(nn.Module):
    """What DeepSpeed wraps: a packed batch to `token_log_probs`."""

    def __init__(
        self,
        model: VisionLanguageModel,
        spec: ModelSpec,
        temperature: float,
        zero3: bool,
        sequence: SequenceGroup | None = None,
    ):
        super().__init__()
        self.banned: Tensor
        self.sequence = sequence
        self.model, self.spec, self.temperature, self.zero3 = model, spec, temperature, zero3
        self.chunk_values = CHUNK_VALUES
        self.observe: Callable[[Tensor], None] | None = None
        self.register_buffer(
            "banned", banned_mask(spec.banned, spec.vocab, next(model.parameters()).device), persistent=False
        )

    def forward(
        self,
        batch: PackedBatch,
        features: Features | None,
        smoothing: float = 0.0,
        reference: ReferenceStates | None = None,
        states_only: bool = False,
    ) -> tuple[Tensor, ...]:
        """features: None runs the vision tower here; states_only: return only `predicting_states`."""
        if features is None:
            views = batch.views
            if not views:
                # ZeRO-3 needs every worker to run the vision tower, and so does a trainable tower, whose
                # gradients are summed over workers: without images, on a dummy view.
                weight = next((p for n, p in self.model.named_parameters() if is_vision(n)), None)
                if weight is not None and (self.zero3 or weight.requires_grad):
                    views = [np.zeros((self.spec.multiple, self.spec.multiple, 3), dtype=np.uint8)]
            if views:
                features = concatenate(self.spec.family.encode_views(self.model, self.spec, views))
        if states_only:
            return (predicting_states(self.model, self.spec, batch, features, self.sequence)[0],)
        return token_log_probs(
            self.model,
            self.spec,
            batch,
            features,
            self.banned,
            self.temperature,
            self.chunk_values,
            smoothing,
            self.sequence,
            self.observe,
            reference,
        )
