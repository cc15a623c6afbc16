"""Forward passes of engine and learner, which encode each image once, and their attention functions."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional

from pixelis.policy.transformers_compat import AttentionInterface, AttentionMaskInterface
from pixelis.policy.vision import patchify

if TYPE_CHECKING:
    from torch import nn

    from pixelis.dialogue.spec import ModelSpec
    from pixelis.policy.packing import PackedBatch, Segments

VisionLanguageModel = Any

FEATURE_CACHE_BYTES = 256 * 2**20
PACKED = "pixelis_packed"
CACHED = "pixelis_cached"
"""Names in transformers' attention registry, for packed rows (learner) and a KV cache (engine)."""


@dataclass(slots=True)
class Features:
    """Output of the vision tower for some views. deepstack: visual input of early decoder layers (Qwen3-VL)."""

    embeds: Float[Tensor, "image_tokens hidden"]
    deepstack: list[Float[Tensor, "image_tokens hidden"]]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.embeds, *self.deepstack))

    def rows(self, index: Int[Tensor, " n"]) -> Features:
        return Features(
            self.embeds.index_select(0, index), [d.index_select(0, index) for d in self.deepstack]
        )


def concatenate(features: Sequence[Features]) -> Features:
    layers = zip(*(f.deepstack for f in features), strict=True)
    return Features(torch.cat([f.embeds for f in features]), [torch.cat(layer) for layer in layers])


def encode_views(
    model: VisionLanguageModel,
    spec: ModelSpec,
    views: Sequence[UInt8[np.ndarray, "h w 3"]],
    one_pass: bool = False,
) -> list[Features]:
    """Features of each view, in order. Views of equal size share a pass of the vision tower.

    one_pass: all sizes in one, as ZeRO-3 needs equally many calls of each layer on all workers.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, view in enumerate(views):
        groups.setdefault(() if one_pass else view.shape[:2], []).append(i)
    out: list[Features | None] = [None] * len(views)
    parameter = next(model.model.visual.parameters())
    for members in groups.values():
        group = [views[i] for i in members]
        pixels, grid = patchify(
            group, spec.patch, spec.merge, spec.temporal, spec.image_mean, spec.image_std, parameter.device
        )
        result = model.model.get_image_features(pixels.to(parameter.dtype), grid, return_dict=True)
        layers = getattr(result, "deepstack_features", None) or []
        # Transformers 5.17 divides only the output of the last layer
        if layers and isinstance(layers[0], Tensor):
            layers = [layer.split([len(output) for output in result.pooler_output]) for layer in layers]
        for position, i in enumerate(members):
            out[i] = Features(result.pooler_output[position], [layer[position] for layer in layers])
    return [f for f in out if f is not None]


class FeatureCache:
    """Least-recently-used cache of a frozen vision tower's features, by digest of the view."""

    def __init__(self, limit: int = FEATURE_CACHE_BYTES):
        self.limit = limit
        self.entries: OrderedDict[bytes, Features] = OrderedDict()
        self.nbytes = 0
        self.misses = 0

    def get(
        self,
        model: VisionLanguageModel,
        spec: ModelSpec,
        views: Sequence[np.ndarray],
        digests: Sequence[bytes],
    ) -> list[Features]:
        distinct = dict(zip(digests, views, strict=True))
        result = {d: self.entries[d] for d in distinct if d in self.entries}
        missing = [d for d in distinct if d not in result]
        self.misses += len(missing)
        for digest in result:
            self.entries.move_to_end(digest)
        if missing:
            with torch.no_grad():
                encoded = encode_views(model, spec, [distinct[d] for d in missing])
            for digest, features in zip(missing, encoded, strict=True):
                # A slice would keep the whole batch in memory after the other views were evicted.
                result[digest] = Features(features.embeds.clone(), [d.clone() for d in features.deepstack])
                self.entries[digest] = result[digest]
                self.nbytes += result[digest].nbytes
        while self.nbytes > self.limit and self.entries:
            _, evicted = self.entries.popitem(last=False)
            self.nbytes -= evicted.nbytes
        return [result[d] for d in digests]

    def clear(self) -> None:
        """Empty the cache. Required when the vision tower changes."""
        self.entries.clear()
        self.nbytes = 0


def hidden_states(
    model: VisionLanguageModel,
    tokens: Int[Tensor, "rows length"],
    positions: Int[Tensor, "axes rows length"],
    features: Features | None,
    image_token: int,
    **attention: Any,
) -> Float[Tensor, "rows length hidden"]:
    """Hidden states of the last layer.

    positions: 3 M-RoPE axes, optionally preceded by text positions; features: of all image tokens, in
    row-major order.
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


def packed_hidden_states(
    model: VisionLanguageModel,
    batch: PackedBatch,
    features: Features | None,
    image_token: int,
    **attention: Any,
) -> Float[Tensor, "tokens hidden"]:
    """`hidden_states` of a packed batch. features: of its distinct views, in order."""
    if features is not None:
        features = features.rows(batch.image_rows)
    # Flash attention derives the samples from the restarting positions and takes no such argument.
    is_packed = model.model.language_model.config._attn_implementation == PACKED
    if is_packed or attention:
        attention["segments"] = batch.segments
    positions = batch.positions[:, None]
    return hidden_states(
        model, batch.tokens[None], positions, features, image_token, use_cache=False, **attention
    )[0]


def use_packed_attention(model: VisionLanguageModel) -> bool:
    """Switch to `packed_attention`, with which samples can share prompts; False with flash attention."""
    text = model.model.language_model.config
    if text._attn_implementation == "sdpa":
        text._attn_implementation = PACKED
    return bool(text._attn_implementation == PACKED)


def use_cached_attention(model: VisionLanguageModel) -> None:
    """Switch to `cached_attention`. Callers must pass 4-D masks."""
    model.model.language_model.config._attn_implementation = CACHED


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens width"],
    key: Float[Tensor, "1 kv_heads tokens width"],
    value: Float[Tensor, "1 kv_heads tokens width"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    segments: Segments,
    **kwargs: object,
) -> tuple[Float[Tensor, "1 tokens heads width"], None]:
    """Causal attention inside each sample of a packed row.

    Samples of similar length form a batch, whose padding at the ends the causal mask hides. Samples that
    share a prompt gather the same keys.
    """
    heads, width = query.shape[1], query.shape[3]
    attend = functools.partial(
        functional.scaled_dot_product_attention,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=key.shape[1] != heads,
    )
    if [bucket.shape for bucket in segments.buckets] == [(1, query.shape[2])]:
        # A single sample needs no gathering
        return attend(query, key, value, is_causal=query.shape[2] > 1).transpose(1, 2), None
    flat = [t[0].transpose(0, 1) for t in (query, key, value)]
    index = torch.cat([bucket.reshape(-1) for bucket in segments.buckets])
    sizes = [bucket.numel() for bucket in segments.buckets]
    outputs = []
    for bucket, *parts in zip(
        segments.buckets, *(t.index_select(0, index).split(sizes) for t in flat), strict=True
    ):
        rows, length = bucket.shape
        # [rows * length, heads, width] -> [rows, heads, length, width]
        q, k, v = (part.view(rows, length, -1, width).transpose(1, 2) for part in parts)
        attended = attend(q, k, v, is_causal=length > 1)
        outputs.append(attended.transpose(1, 2).reshape(rows * length, heads, width))
    return torch.cat(outputs).index_select(0, segments.inverse).unsqueeze(0), None


def cached_attention(
    module: nn.Module,
    query: Float[Tensor, "rows heads n width"],
    key: Float[Tensor, "rows kv_heads columns width"],
    value: Float[Tensor, "rows kv_heads columns width"],
    attention_mask: Bool[Tensor, "rows 1 n columns"] | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Float[Tensor, "rows n heads width"], None]:
    """Attention over cached keys and values; heads that share a key become further queries of it, not copies."""
    rows, heads, length, width = query.shape
    group_size = heads // key.shape[1]
    mask = attention_mask
    if group_size > 1:
        query = query.reshape(rows, key.shape[1], group_size * length, width)
        mask = mask.repeat(1, 1, group_size, 1) if mask is not None and length > 1 else mask
    attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return attended.reshape(rows, heads, length, width).transpose(1, 2), None


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(CACHED, cached_attention)
# No mask: the buckets separate the samples.
AttentionMaskInterface.register(PACKED, lambda *args, **kwargs: None)
AttentionMaskInterface.register(CACHED, lambda *args, **kwargs: None)
