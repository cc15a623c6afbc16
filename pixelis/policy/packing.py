"""Packing: many sequences of unequal length become one row without padding.

A micro-batch is the concatenation of its samples. Nothing is padded, so every computed token is a real one; attention is kept
inside each sample by `forward.packed_attention` (or by flash-attn's variable-length kernel), positions restart at each sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pixelis.dialogue.positions import mrope_positions
from pixelis.errors import DataFailure

if TYPE_CHECKING:
    from pixelis.dialogue.spec import ModelSpec
    from pixelis.policy.samples import TrainSample

SIMILAR = 0.8
"""Samples at least this share as long as the longest of a bucket attend together: the rest of the bucket is padding."""


@dataclass(slots=True)
class Segments:
    """Where the samples of a row stand, for attention.

    buckets: int64 [samples, length] each, indices of a sample's tokens in the row (its last one repeated behind its end);
    inverse: int64 [N], where each token of the row stands in the concatenation of the flattened buckets.
    """

    buckets: list[torch.Tensor]
    inverse: torch.Tensor


@dataclass(slots=True)
class PackedBatch:
    """One packed micro-batch of S samples and N tokens.

    tokens int64 [N]; positions int64 [4, N]: row 0 counts within the sample, rows 1-3 are M-RoPE (time, row, column); mask bool
    [N]; behaviour float32 [N] log-probabilities; weights float32 [N], what a token counts in `sft`; sequence int64 [N]: the
    sample of each token; advantages float32 [S]; policy_tokens int64 [S]: masked-in tokens of each sample; views: the D
    distinct views with their digests; image_rows int64 [image tokens]: for each image token, in order, its row in the
    concatenated features of the distinct views.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    behaviour: torch.Tensor
    weights: torch.Tensor
    sequence: torch.Tensor
    advantages: torch.Tensor
    policy_tokens: torch.Tensor
    segments: Segments
    views: list[np.ndarray]
    digests: list[bytes]
    image_rows: torch.Tensor

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tensors on `device`; views stay where they are."""
        names = ("tokens", "positions", "mask", "behaviour", "weights", "sequence", "advantages", "policy_tokens", "image_rows")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        segments = Segments([b.to(device, non_blocking=True) for b in self.segments.buckets], self.segments.inverse.to(device))
        return PackedBatch(**moved, segments=segments, views=self.views, digests=self.digests)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: indices of the samples of each bin, at most `capacity` tokens in a bin.

    Every index appears once and the result depends on the lengths alone. Raises DataFailure for a sample longer than a bin.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise DataFailure(f"a sample of {length} tokens does not fit {capacity}", code="over_context")
        for place, free in enumerate(room):
            if length <= free:
                bins[place].append(index)
                room[place] -= length
                break
        else:
            bins.append([index])
            room.append(capacity - length)
    return bins


def collate(samples: Sequence[TrainSample], spec: ModelSpec) -> PackedBatch:
    """Samples one behind the other, in the order given. Raises BadInput when image tokens and views disagree."""
    lengths = [len(s.tokens) for s in samples]
    total = sum(lengths)
    positions = np.empty((4, total), dtype=np.int64)
    distinct: dict[bytes, int] = {}
    views: list[np.ndarray] = []
    starts: list[int] = [0]
    image_rows: list[np.ndarray] = []
    start = 0
    for sample, length in zip(samples, lengths, strict=True):
        grids = [spec.grid(view.shape[0], view.shape[1]) for view in sample.views]
        positions[0, start : start + length] = np.arange(length)
        positions[1:, start : start + length], _ = mrope_positions(sample.tokens, grids, spec.image_token, spec.merge)
        start += length
        for view, digest in zip(sample.views, sample.digests, strict=True):
            if digest not in distinct:
                distinct[digest] = len(views)
                views.append(view)
                starts.append(starts[-1] + spec.image_tokens(view.shape[0], view.shape[1]))
            place = distinct[digest]
            image_rows.append(np.arange(starts[place], starts[place + 1]))
    return PackedBatch(
        tokens=torch.from_numpy(np.concatenate([s.tokens for s in samples]).astype(np.int64)),
        positions=torch.from_numpy(positions),
        mask=torch.from_numpy(np.concatenate([s.mask for s in samples]).astype(bool)),
        behaviour=torch.from_numpy(np.concatenate([s.log_probs for s in samples]).astype(np.float32)),
        weights=torch.from_numpy(np.concatenate([_weights(s) for s in samples])),
        sequence=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float32),
        policy_tokens=torch.tensor([s.policy_tokens for s in samples], dtype=torch.int64),
        segments=segment(lengths),
        views=views,
        digests=list(distinct),
        image_rows=torch.from_numpy(np.concatenate(image_rows) if image_rows else np.empty(0, dtype=np.int64)),
    )


def _weights(sample: TrainSample) -> np.ndarray:
    return np.ones(len(sample.tokens), np.float32) if sample.weights is None else sample.weights.astype(np.float32)


def segment(lengths: Sequence[int]) -> Segments:
    """Buckets of similar length for samples of these lengths that stand one behind the other."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    buckets: list[torch.Tensor] = []
    inverse = np.empty(int(sum(lengths)), dtype=np.int64)
    offset = place = 0
    while place < len(order):
        longest = lengths[order[place]]
        stop = place
        while stop < len(order) and lengths[order[stop]] >= SIMILAR * longest:
            stop += 1
        members = order[place:stop]
        size = np.asarray([lengths[i] for i in members])
        within = np.arange(longest)[None, :]
        bucket = starts[members][:, None] + np.minimum(within, size[:, None] - 1)
        real = within < size[:, None]
        inverse[bucket[real]] = offset + np.flatnonzero(real.ravel())
        buckets.append(torch.from_numpy(bucket))
        offset += bucket.size
        place = stop
    return Segments(buckets, torch.from_numpy(inverse))
