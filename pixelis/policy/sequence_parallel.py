"""Sequence parallelism: workers of a group divide the tokens of a packed row among them.

For attention, all-to-all exchanges turn a part of the row with all heads into the whole row with some heads,
and back (DeepSpeed-Ulysses, arXiv 2309.14509, sections 3.1 and 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from pixelis.errors import BadConfig
from pixelis.families.attention import (
    PACKED,
    AttentionInterface,
    AttentionMaskInterface,
    Segments,
    packed_attention,
)
from pixelis.policy.distributed import rank_and_world_size, sum_over_workers

if TYPE_CHECKING:
    from torch import nn

    from pixelis.families.family import ModelSpec
    from pixelis.policy.packing import PackedBatch

SEQUENCE_PARALLEL = "pixelis_sequence_parallel"


@dataclass(frozen=True)
class SequenceGroup:
    """The `size` workers of consecutive ranks that process the same samples."""

    size: int
    rank: int
    group: Any

    @classmethod
    def create(cls, size: int) -> SequenceGroup:
        """The group of this worker. Collective. Raises BadConfig if `size` does not divide the workers."""
        rank, world = rank_and_world_size()
        if world % size:
            fix = "set learner.workers and learner.min_workers to multiples of learner.sequence_parallel"
            raise BadConfig(
                f"{world} learners cannot form groups of learner.sequence_parallel={size}", fix=fix
            )
        groups = [
            dist.new_group(list(range(first, first + size))) if size > 1 else None
            for first in range(0, world, size)
        ]
        return cls(size, rank % size, groups[rank // size])

    @property
    def share(self) -> tuple[int, int]:
        """(number of this group, number of groups): each group processes one share of a batch."""
        rank, world = rank_and_world_size()
        return rank // self.size, world // self.size

    def sum(self, values: list[float], largest: int = 0) -> list[float]:
        """`sum_over_workers` of values that are equal within a group, which counts once."""
        return sum_over_workers(
            values if self.rank == 0 else [*values[:largest], *[0.0] * (len(values) - largest)], largest
        )

    def check(self, text: Any) -> None:
        """Switch the attention of a language model's configuration. BadConfig if its heads cannot be divided."""
        if self.size == 1:
            return
        if others := set(getattr(text, "layer_types", None) or ()) - {"full_attention"}:
            raise BadConfig(
                f"learner.sequence_parallel does not work with layers of type {min(others)}",
                fix="set learner.sequence_parallel=1",
            )
        heads, shared = text.num_attention_heads, text.num_key_value_heads
        if heads % self.size or (shared % self.size and self.size % shared):
            message = (
                f"learner.sequence_parallel {self.size} does not divide {heads} attention heads and "
                f"{shared} key heads"
            )
            raise BadConfig(
                message, fix=f"use a divisor of {heads} that divides {shared} or is a multiple of it"
            )
        if text._attn_implementation != PACKED:
            raise BadConfig(
                f"learner.sequence_parallel does not work with policy.attention={text._attn_implementation}",
                fix="set policy.attention=sdpa",
            )
        text._attn_implementation = SEQUENCE_PARALLEL

    def part(self, batch: PackedBatch, spec: ModelSpec) -> PackedBatch:
        """The batch with this worker's part of the row, padded to equal length, and its image tokens' views."""
        if self.size == 1:
            return batch
        length = -(-len(batch.tokens) // self.size)
        start = self.rank * length
        tokens, positions = batch.tokens[start : start + length], batch.positions[:, start : start + length]
        is_image = batch.tokens == spec.image_token
        first, count = int(is_image[:start].sum()), int(is_image[start : start + length].sum())
        rows = batch.image_rows[first : first + count].numpy()
        ends = np.cumsum(
            [spec.image_tokens(view.shape[0], view.shape[1]) for view in batch.views], dtype=np.int64
        )
        owners = np.searchsorted(ends, rows, side="right")
        needed, places = np.unique(owners, return_inverse=True)
        sizes = np.diff(ends, prepend=0)[needed]
        # Features of the views that are left out precede the others' no longer.
        rows = rows - (ends[needed] - sizes)[places] + (np.cumsum(sizes) - sizes)[places]
        padding = length - len(tokens)
        return replace(
            batch,
            tokens=functional.pad(tokens, (0, padding), value=spec.stop),
            positions=functional.pad(positions, (0, padding)),
            views=[batch.views[i] for i in needed],
            digests=[batch.digests[i] for i in needed],
            image_rows=torch.from_numpy(rows),
        )

    def gather(self, values: Float[Tensor, " own"], own: Tensor, count: int) -> Float[Tensor, " count"]:
        """Values of all workers from those of each. own: indices of this worker's values."""
        return _Gather.apply(values, own, count, self.group)


class _Gather(torch.autograd.Function):
    """Place values and sum the workers' vectors. All compute the same loss, so each gradient is complete."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(own)
        out = values.new_zeros(count).index_copy_(0, own, values)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return gradient.index_select(0, own), None, None, None


class _Exchange(torch.autograd.Function):
    """All-to-all: slice `i` of the first dimension is exchanged with worker `i`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchange(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None


def _exchange(values: Tensor, group: Any) -> Tensor:
    out = torch.empty_like(values, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, values.contiguous(), group=group)
    return out


def sequence_parallel_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads part width"],
    key: Float[Tensor, "1 kv_heads part width"],
    value: Float[Tensor, "1 kv_heads part width"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    segments: Segments,
    sequence: SequenceGroup,
    **kwargs: object,
) -> tuple[Float[Tensor, "1 part heads width"], None]:
    """`packed_attention` over the whole row with this worker's share of the heads."""
    workers, length, row = sequence.size, query.shape[2], len(segments.inverse)
    if (copies := workers // key.shape[1]) > 1:
        key, value = (t.repeat_interleave(copies, dim=1) for t in (key, value))
    # [1, heads, part, width] -> [workers, heads / workers, part, width], queries beside keys and values: one
    # exchange for all.
    heads = [t[0].unflatten(0, (workers, -1)) for t in (query, key, value)]
    sizes = [t.shape[1] for t in heads]
    received = _Exchange.apply(torch.cat(heads, 1), sequence.group)
    # [workers, heads, part, width] -> [1, heads, row, width]; the row ends before the padding.
    query, key, value = (t.transpose(0, 1).flatten(1, 2)[None, :, :row] for t in received.split(sizes, 1))
    attended, _ = packed_attention(module, query, key, value, None, scaling, dropout, segments=segments)
    padded = functional.pad(attended[0], (0, 0, 0, 0, 0, workers * length - row))
    # [row, heads / workers, width] -> [workers, part, heads / workers, width] -> [1, part, heads, width]
    back = _Exchange.apply(padded.unflatten(0, (workers, length)), sequence.group)
    return back.transpose(0, 1).flatten(1, 2)[None], None


AttentionInterface.register(SEQUENCE_PARALLEL, sequence_parallel_attention)
AttentionMaskInterface.register(SEQUENCE_PARALLEL, lambda *args, **kwargs: None)
