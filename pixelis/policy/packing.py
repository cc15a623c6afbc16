"""Packing: many sequences of unequal length become one row without padding.

A micro-batch is the concatenation of its samples. Nothing is padded, so every computed token is a real one; attention is kept
inside each sample by `forward.packed_attention` (or by flash-attn's variable-length kernel), positions restart at each sample.
Rollouts of one group begin with the same prompt, whose hidden states and keys are the same for all of them: `packed_attention`
lets the row hold it once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pixelis.dialogue.positions import mrope_positions
from pixelis.errors import DataFailure

if TYPE_CHECKING:
    from pixelis.dialogue.spec import ModelSpec
    from pixelis.policy.samples import TrainSample

SIMILAR = 0.8
"""Samples at least this share as long as the longest of a bucket attend together: the rest of the bucket is padding."""


SHARED = 8
"""So many tokens of a prompt that a bin already has count as one: a layer keeps them for attention only, not for the rest."""


class Prompt(NamedTuple):
    """What samples may share. key: equal for equal tokens and pictures."""

    key: Hashable
    length: int


@dataclass(slots=True)
class Segments:
    """Where the samples of a row stand, for attention.

    buckets: int64 [samples, length] each, indices of a sample's tokens in the row (its last one repeated behind its end);
    inverse: int64 [N], where each token of the row stands in the concatenation of the flattened buckets (one of its places there,
    when samples share it).
    """

    buckets: list[torch.Tensor]
    inverse: torch.Tensor


@dataclass(slots=True)
class PackedBatch:
    """One packed micro-batch of S samples, N tokens and M policy tokens.

    tokens int64 [N]; positions int64 [4, N]: row 0 counts within the sample, rows 1-3 are M-RoPE (time, row, column); mask bool
    [N]; previous int64 [M]: where the token before each policy token stands; behaviour float32 [N] log-probabilities; weights
    float32 [N], what a token counts in `sft`; sequence int64 [N]: the sample of each token (of a shared prompt, its first);
    advantages float32 [S]; policy_tokens int64 [S]: masked-in tokens of each sample; views: the D
    distinct views with their digests; image_rows int64 [image tokens]: for each image token, in order, its row in the
    concatenated features of the distinct views.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    previous: torch.Tensor
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
        names = ("tokens", "positions", "mask", "previous", "behaviour", "weights", "sequence", "advantages", "policy_tokens")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in (*names, "image_rows")}
        segments = Segments([b.to(device, non_blocking=True) for b in self.segments.buckets], self.segments.inverse.to(device))
        return PackedBatch(**moved, segments=segments, views=self.views, digests=self.digests)


def pack(lengths: Sequence[int], capacity: int, prompts: Sequence[Prompt] | None = None) -> list[list[int]]:
    """First-fit decreasing: indices of the samples of each bin, at most `capacity` tokens in a bin.

    prompts: of each sample, when samples of a bin share them. Those of one prompt then stand together, first the prompt with most
    tokens, in a bin that already has the prompt as long as there is room. Every index appears once and the result depends on the
    arguments alone. Raises DataFailure for a sample longer than a bin.
    """
    prompts = [Prompt(i, 0) for i in range(len(lengths))] if prompts is None else prompts
    together: dict[Hashable, int] = {}
    for length, prompt in zip(lengths, prompts, strict=True):
        together[prompt.key] = together.get(prompt.key, 0) + length
    first = {key: place for place, key in enumerate(together)}
    bins: list[list[int]] = []
    room: list[int] = []
    held: list[set[Hashable]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-together[prompts[i].key], first[prompts[i].key], -lengths[i], i)):
        length, prompt = lengths[index], prompts[index]
        if length > capacity:
            raise DataFailure(f"a sample of {length} tokens does not fit {capacity}", code="over_context")
        beside = length - prompt.length + -(-prompt.length // SHARED)
        costs = [beside if prompt.key in keys else length for keys in held]
        fits = [place for place, cost in enumerate(costs) if cost <= room[place]]
        place = min(fits, key=lambda place: (prompt.key not in held[place], place), default=len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
            held.append(set())
            costs.append(length)
        bins[place].append(index)
        room[place] -= costs[place]
        held[place].add(prompt.key)
    return bins


def pack_samples(samples: Sequence[TrainSample], spec: ModelSpec, capacity: int, share: bool) -> list[list[int]]:
    """`pack` for samples that share their prompts, or do not. Raises as it does."""
    return pack([len(s.tokens) for s in samples], capacity, [prompt_of(s, spec) for s in samples] if share else None)


def collate(samples: Sequence[TrainSample], spec: ModelSpec, share: bool = False) -> PackedBatch:
    """Samples one behind the other, in the order given. Raises BadInput when image tokens and views disagree.

    share: the row holds a prompt that several samples begin with once, which only `packed_attention` understands.
    """
    lengths = [len(s.tokens) for s in samples]
    total = sum(lengths)
    positions = np.empty((4, total), dtype=np.int64)
    distinct: dict[bytes, int] = {}
    views: list[np.ndarray] = []
    starts: list[int] = [0]
    image_rows: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    start = 0
    # Of each token of the samples: whether the row holds it, or else the token that stands for it.
    kept, stands_for = np.ones(total, dtype=bool), np.arange(total)
    seen: dict[Hashable, int] = {}
    for sample, length in zip(samples, lengths, strict=True):
        grids = [spec.grid(view.shape[0], view.shape[1]) for view in sample.views]
        positions[0, start : start + length] = np.arange(length)
        positions[1:, start : start + length], _ = mrope_positions(sample.tokens, grids, spec.image_token, spec.merge)
        if share:
            prompt = prompt_of(sample, spec)
            origin = seen.setdefault(prompt.key, start)
            kept[start : start + prompt.length] = origin == start
            stands_for[start : start + prompt.length] = np.arange(origin, origin + prompt.length)
        start += length
        for view, digest in zip(sample.views, sample.digests, strict=True):
            if digest not in distinct:
                distinct[digest] = len(views)
                views.append(view)
                starts.append(starts[-1] + spec.image_tokens(view.shape[0], view.shape[1]))
            place = distinct[digest]
            image_rows.append(np.arange(starts[place], starts[place + 1]))
    tokens = np.concatenate([s.tokens for s in samples]).astype(np.int64)
    mask = np.concatenate([s.mask for s in samples]).astype(bool)
    places = (np.cumsum(kept) - 1)[stands_for]
    return PackedBatch(
        tokens=torch.from_numpy(tokens[kept]),
        positions=torch.from_numpy(positions[:, kept]),
        mask=torch.from_numpy(mask[kept]),
        previous=torch.from_numpy(places[np.flatnonzero(mask) - 1]),
        behaviour=torch.from_numpy(np.concatenate([s.log_probs for s in samples]).astype(np.float32)[kept]),
        weights=torch.from_numpy(np.concatenate([_weights(s) for s in samples])[kept]),
        sequence=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)[kept]),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float32),
        policy_tokens=torch.tensor([s.policy_tokens for s in samples], dtype=torch.int64),
        segments=segment(lengths, places),
        views=views,
        digests=list(distinct),
        image_rows=torch.from_numpy(np.concatenate(image_rows)[kept[tokens == spec.image_token]]),
    )


def prompt_of(sample: TrainSample, spec: ModelSpec) -> Prompt:
    """All before the policy's first token."""
    length = int(sample.mask.argmax())
    tokens = sample.tokens[:length]
    pads = int((tokens == spec.image_token).sum())
    sizes = np.cumsum([spec.image_tokens(view.shape[0], view.shape[1]) for view in sample.views])
    return Prompt((tokens.tobytes(), *sample.digests[: np.searchsorted(sizes, pads, side="right")]), length)


def _weights(sample: TrainSample) -> np.ndarray:
    return np.ones(len(sample.tokens), np.float32) if sample.weights is None else sample.weights.astype(np.float32)


def segment(lengths: Sequence[int], places: np.ndarray | None = None) -> Segments:
    """Buckets of similar length for samples of these lengths that stand one behind the other.

    places: int64 [sum of the lengths], where the row holds each of their tokens; None: at its own place.
    """
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    places = np.arange(sum(lengths)) if places is None else places
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    buckets: list[torch.Tensor] = []
    inverse = np.empty(int(places.max()) + 1, dtype=np.int64)
    offset = place = 0
    while place < len(order):
        longest = lengths[order[place]]
        stop = place
        while stop < len(order) and lengths[order[stop]] >= SIMILAR * longest:
            stop += 1
        members = order[place:stop]
        size = np.asarray([lengths[i] for i in members])
        within = np.arange(longest)[None, :]
        bucket = places[starts[members][:, None] + np.minimum(within, size[:, None] - 1)]
        real = within < size[:, None]
        inverse[bucket[real]] = offset + np.flatnonzero(real.ravel())
        buckets.append(torch.from_numpy(bucket))
        offset += bucket.size
        place = stop
    return Segments(buckets, torch.from_numpy(inverse))
