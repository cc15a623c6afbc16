"""Attention functions for packed rows (learner) and for a KV cache (engine), in transformers' registry."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from pixelis.families.quick_imports import quick_imports

with quick_imports():
    from transformers import AttentionInterface, AttentionMaskInterface

if TYPE_CHECKING:
    from torch import nn

PACKED = "pixelis_packed"
CACHED = "pixelis_cached"
"""Names in the registry."""


class Runs(NamedTuple):
    """Runs of tokens of similar length, for layers with a state: samples, shared prompts, or what follows these.

    rows: row index of each token, padded with the last; sizes: tokens of each run; prompts: the shared prompt
    that each continues, by its number among the runs that continue none.
    """

    rows: Int[Tensor, "runs length"]
    sizes: Int[Tensor, " runs"]
    prompts: Int[Tensor, " runs"] | None


@dataclass(slots=True)
class Segments:
    """Positions of the samples in a row.

    buckets: row index of each token of samples of similar length, padded with the last; inverse: of each
    token, its place in the flattened buckets; runs: the row's tokens, each once, shared prompts first;
    run_inverse: of each token, its place in the flattened runs.
    """

    buckets: list[Int[Tensor, "samples length"]]
    inverse: Int[Tensor, " row"]
    runs: list[Runs]
    run_inverse: Int[Tensor, " row"]

    def to(self, device: torch.device | str) -> Segments:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        runs = [
            Runs(move(rows), move(sizes), None if prompts is None else move(prompts))
            for rows, sizes, prompts in self.runs
        ]
        return Segments([*map(move, self.buckets)], move(self.inverse), runs, move(self.run_inverse))


def within_window(
    mask: Bool[Tensor, "rows 1 new columns"], valid: Bool[Tensor, "rows columns"], window: int
) -> Bool[Tensor, "rows 1 new columns"]:
    """The engine's mask for layers with a sliding window, counted in the cache's `valid` columns."""
    new, columns = mask.shape[2:]
    places = valid[:, :columns].cumsum(1)
    return mask & (places[:, columns - new :, None] - places[:, None] < window)[:, None]


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
    sliding_window: int | None = None,
    window_masks: Sequence[Tensor | None] = (),
    **kwargs: object,
) -> tuple[Float[Tensor, "1 tokens heads width"], None]:
    """Causal attention inside each sample of a packed row.

    Samples of similar length form a batch, whose padding at the ends the causal mask hides. Samples that
    share a prompt gather the same keys. window_masks: of each bucket, for layers with a `sliding_window`.
    """
    heads, width = query.shape[1], query.shape[3]
    attend = functools.partial(
        functional.scaled_dot_product_attention,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=key.shape[1] != heads,
    )
    masks = window_masks if sliding_window and window_masks else [None] * len(segments.buckets)
    if [bucket.shape for bucket in segments.buckets] == [(1, query.shape[2])]:
        # A single sample needs no gathering
        is_causal = masks[0] is None and query.shape[2] > 1
        return attend(query, key, value, attn_mask=masks[0], is_causal=is_causal).transpose(1, 2), None
    flat = [t[0].transpose(0, 1) for t in (query, key, value)]
    index = torch.cat([bucket.reshape(-1) for bucket in segments.buckets])
    sizes = [bucket.numel() for bucket in segments.buckets]
    outputs = []
    for bucket, mask, *parts in zip(
        segments.buckets, masks, *(t.index_select(0, index).split(sizes) for t in flat), strict=True
    ):
        rows, length = bucket.shape
        # [rows * length, heads, width] -> [rows, heads, length, width]
        q, k, v = (part.view(rows, length, -1, width).transpose(1, 2) for part in parts)
        attended = attend(q, k, v, attn_mask=mask, is_causal=mask is None and length > 1)
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
