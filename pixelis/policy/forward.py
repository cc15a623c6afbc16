"""The model's two halves, called directly: views -> features, and tokens with features -> hidden states.

transformers' own forward would run the vision tower again for every rollout that looks at the same picture, and would attend over
a packed row with a square mask. Engine and learner both go through here, so they compute the same thing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from pixelis.policy.transformers_compat import AttentionInterface, AttentionMaskInterface
from pixelis.policy.vision import patchify

if TYPE_CHECKING:
    from torch import nn

    from pixelis.dialogue.spec import ModelSpec
    from pixelis.policy.packing import Segments

VisionLanguageModel = Any
"""A `Qwen2_5_VLForConditionalGeneration` or `Qwen3VLForConditionalGeneration`: nothing that both share types their halves."""

PACKED = "pixelis_packed"
CACHED = "pixelis_cached"
"""Names of our two attentions in transformers' registry: packed rows (learner), rows with a KV cache (engine)."""


@dataclass(slots=True)
class Features:
    """What the vision tower made of one or more views.

    embeds: [image tokens, hidden]; deepstack: one [image tokens, hidden] per early layer that gets visual features (Qwen3-VL).
    """

    embeds: torch.Tensor
    deepstack: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in (self.embeds, *self.deepstack))

    def rows(self, index: torch.Tensor) -> Features:
        """The features of the image tokens `index`, int64 [n]."""
        return Features(self.embeds.index_select(0, index), [d.index_select(0, index) for d in self.deepstack])


def concatenate(features: Sequence[Features]) -> Features:
    """Features of several views, one behind the other."""
    layers = len(features[0].deepstack)
    return Features(
        torch.cat([f.embeds for f in features]), [torch.cat([f.deepstack[i] for f in features]) for i in range(layers)]
    )


def encode_views(
    model: VisionLanguageModel, spec: ModelSpec, views: Sequence[np.ndarray], one_pass: bool = False
) -> list[Features]:
    """Features of each view, uint8 [h, w, 3], in order. Views of equal size share one pass of the vision tower.

    one_pass: all sizes in a single pass, for ZeRO-3, where every worker must enter each layer equally often.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, view in enumerate(views):
        groups.setdefault(() if one_pass else view.shape[:2], []).append(i)
    out: list[Features | None] = [None] * len(views)
    parameter = next(model.model.visual.parameters())
    for members in groups.values():
        pixels, grid = patchify(
            [views[i] for i in members], spec.patch, spec.merge, spec.temporal, spec.image_mean, spec.image_std
        )
        result = model.model.get_image_features(
            pixels.to(parameter.device, parameter.dtype), grid.to(parameter.device), return_dict=True
        )
        layers = getattr(result, "deepstack_features", None) or []
        for place, i in enumerate(members):
            out[i] = Features(result.pooler_output[place], [layer[place] for layer in layers])
    return [f for f in out if f is not None]


class FeatureCache:
    """Features of views by content, while the vision tower is frozen; the least recently used go when `limit` bytes are full."""

    def __init__(self, limit: int = 256 * 2**20):
        self.limit = limit
        self.entries: OrderedDict[bytes, Features] = OrderedDict()
        self.nbytes = 0
        self.hits = self.misses = 0

    def get(
        self, model: VisionLanguageModel, spec: ModelSpec, views: Sequence[np.ndarray], digests: Sequence[bytes]
    ) -> list[Features]:
        """Features of each view; only those not seen before pass through the vision tower, each once."""
        wanted = dict(zip(digests, views, strict=True))
        found = {d: self.entries[d] for d in wanted if d in self.entries}
        missing = [d for d in wanted if d not in found]
        self.hits += len(digests) - len(missing)
        self.misses += len(missing)
        for digest in found:
            self.entries.move_to_end(digest)
        if missing:
            with torch.no_grad():
                made = encode_views(model, spec, [wanted[d] for d in missing])
            for digest, features in zip(missing, made, strict=True):
                # A slice would keep the whole batch alive after its neighbours were evicted.
                found[digest] = Features(features.embeds.clone(), [d.clone() for d in features.deepstack])
                self.entries[digest] = found[digest]
                self.nbytes += found[digest].nbytes
        while self.nbytes > self.limit and self.entries:
            _, old = self.entries.popitem(last=False)
            self.nbytes -= old.nbytes
        return [found[d] for d in digests]

    def clear(self) -> None:
        """Forget everything: the vision tower has changed."""
        self.entries.clear()
        self.nbytes = 0


def hidden_states(
    model: VisionLanguageModel,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    features: Features | None,
    image_token: int,
    **attention: Any,
) -> torch.Tensor:
    """Last hidden states, [rows, length, hidden].

    tokens: int64 [rows, length]; positions: int64 [3 or 4, rows, length]; features: of all image tokens in row-major order, None
    when there are none; attention: `attention_mask`, `past_key_values`, `use_cache`, or `segments` for a packed row.
    """
    language_model = model.model.language_model
    embeds = language_model.embed_tokens(tokens)
    if features is not None:
        is_image = tokens == image_token
        if is_image.sum() != len(features.embeds):
            raise ValueError(f"{int(is_image.sum())} image tokens but features of {len(features.embeds)}")
        embeds = embeds.masked_scatter(is_image.unsqueeze(-1), features.embeds.to(embeds.dtype))
        if features.deepstack:
            attention |= {"visual_pos_masks": is_image, "deepstack_visual_embeds": features.deepstack}
    return language_model(inputs_embeds=embeds, position_ids=positions, **attention).last_hidden_state


def use_packed_attention(model: VisionLanguageModel) -> bool:
    """Let the language model attend through `packed_attention` (unless it uses flash attention, which packs by itself).

    Returns whether it does, so that samples of a row may share their prompts.
    """
    text = model.model.language_model.config
    if text._attn_implementation == "sdpa":
        text._attn_implementation = PACKED
    return bool(text._attn_implementation == PACKED)


def use_cached_attention(model: VisionLanguageModel) -> None:
    """Let the language model attend through `cached_attention`; callers pass 4-D masks."""
    model.model.language_model.config._attn_implementation = CACHED


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sample of a packed row: query [1, heads, N, width] -> [1, N, heads, width].

    Samples of similar length are gathered into a batch of their own and padded behind their ends, where a causal mask already
    hides the padding. The cost is that of the samples, not of the square of the row. Samples that share a prompt gather the same
    keys, values and queries of it.
    """
    if segments is None:
        raise ValueError("packed attention needs `segments`: use forward.hidden_states(..., segments=batch.segments)")
    heads, width = query.shape[1], query.shape[3]
    grouped = key.shape[1] != heads
    flat = [t[0].transpose(0, 1) for t in (query, key, value)]
    index = torch.cat([bucket.reshape(-1) for bucket in segments.buckets])
    sizes = [bucket.numel() for bucket in segments.buckets]
    outputs = []
    for bucket, *parts in zip(segments.buckets, *(t.index_select(0, index).split(sizes) for t in flat), strict=True):
        rows, length = bucket.shape
        # [rows * length, heads, width] -> [rows, heads, length, width]
        q, k, v = (part.view(rows, length, -1, width).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=length > 1, scale=scaling, enable_gqa=grouped
        )
        outputs.append(attended.transpose(1, 2).reshape(rows * length, heads, width))
    return torch.cat(outputs).index_select(0, segments.inverse).unsqueeze(0), None


def cached_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention over cached keys: query [rows, heads, n, width], key [rows, kv heads, columns, width].

    attention_mask: bool [rows, 1, n, columns]. Query heads that share a key head stand in line as if they were more queries of
    it, so that nothing is copied; stock sdpa repeats keys and values for each of them, at every step.
    """
    rows, heads, length, width = query.shape
    shared = heads // key.shape[1]
    mask = attention_mask
    if shared > 1:
        query = query.reshape(rows, key.shape[1], shared * length, width)
        mask = mask.repeat(1, 1, shared, 1) if mask is not None and length > 1 else mask
    attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return attended.reshape(rows, heads, length, width).transpose(1, 2), None


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(CACHED, cached_attention)
# No mask at all: the buckets keep the samples apart.
AttentionMaskInterface.register(PACKED, lambda *args, **kwargs: None)
AttentionMaskInterface.register(CACHED, lambda *args, **kwargs: None)
