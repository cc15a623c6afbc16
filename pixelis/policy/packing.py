"""Sequence packing: samples in one row without padding, attention inside each, shared prompts held once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pixelis.errors import DataFailure
from pixelis.families.attention import Runs, Segments
from pixelis.policy.samples import unusable

if TYPE_CHECKING:
    from pixelis.config import LearnerConfig
    from pixelis.families.family import ModelSpec
    from pixelis.policy.samples import TrainSample

BUCKET_RATIO = 0.8
"""Shortest sample of an attention bucket, as a share of its longest one. The difference is padding."""

SHARED_TOKENS_PER_TOKEN = 8
"""Tokens of a prompt already in the bin that cost as much as one new token."""


class Prompt(NamedTuple):
    """The part of a sample before its first policy token. key: equal for equal tokens and images."""

    key: Hashable
    length: int


@dataclass(slots=True)
class PackedBatch:
    """One packed micro-batch: `row` tokens of `samples` samples, of which `tokens` are policy tokens.

    positions: index within the sample, then M-RoPE; targets: ids of the policy tokens; previous: row index of
    the token before each; sequence: sample of each token (of a shared prompt, its first); views: the distinct
    images; image_rows: row of each image token in their features.
    """

    tokens: Int[Tensor, " row"]
    positions: Int[Tensor, "4 row"]
    mask: Bool[Tensor, " row"]
    targets: Int[Tensor, " tokens"]
    previous: Int[Tensor, " tokens"]
    behaviour: Float[Tensor, " row"]
    weights: Float[Tensor, " row"]
    sequence: Int[Tensor, " row"]
    advantages: Float[Tensor, " samples"]
    policy_tokens: Int[Tensor, " samples"]
    segments: Segments
    views: list[np.ndarray]
    digests: list[bytes]
    image_rows: Int[Tensor, " image_tokens"]

    def to(self, device: torch.device | str) -> PackedBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = {
            name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()
        }
        return replace(self, **moved, segments=self.segments.to(device))


def pack(lengths: Sequence[int], capacity: int, prompts: Sequence[Prompt] | None = None) -> list[list[int]]:
    """Pack samples into bins of at most `capacity` tokens, first-fit decreasing; returns each bin's indices.

    prompts: samples with the same prompt go together while there is room.
    """
    prompts = [Prompt(i, 0) for i in range(len(lengths))] if prompts is None else prompts
    prompt_tokens: dict[Hashable, int] = {}
    for length, prompt in zip(lengths, prompts, strict=True):
        prompt_tokens[prompt.key] = prompt_tokens.get(prompt.key, 0) + length
    first = {key: place for place, key in enumerate(prompt_tokens)}
    bins: list[list[int]] = []
    room: list[int] = []
    bin_prompts: list[set[Hashable]] = []
    for index in sorted(
        range(len(lengths)),
        key=lambda i: (-prompt_tokens[prompts[i].key], first[prompts[i].key], -lengths[i], i),
    ):
        length, prompt = lengths[index], prompts[index]
        if length > capacity:
            raise DataFailure(f"a sample of {length} tokens does not fit {capacity}", code="over_context")
        beside = length - prompt.length + -(-prompt.length // SHARED_TOKENS_PER_TOKEN)
        costs = [beside if prompt.key in keys else length for keys in bin_prompts]
        fits = [place for place, cost in enumerate(costs) if cost <= room[place]]
        place = min(fits, key=lambda place: (prompt.key not in bin_prompts[place], place), default=len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
            bin_prompts.append(set())
            costs.append(length)
        bins[place].append(index)
        room[place] -= costs[place]
        bin_prompts[place].add(prompt.key)
    return bins


def pack_samples(
    samples: Sequence[TrainSample], spec: ModelSpec, capacity: int, share: bool
) -> list[list[int]]:
    return pack(
        [len(s.tokens) for s in samples], capacity, [prompt_of(s, spec) for s in samples] if share else None
    )


def usable_bins(
    samples: Sequence[TrainSample], spec: ModelSpec, learner: LearnerConfig, share: bool
) -> list[list[int]]:
    """Bins of a learner's rows, as indices of the samples that are usable."""
    usable = [i for i, s in enumerate(samples) if unusable(s, spec, learner.row_tokens) is None]
    bins = pack_samples([samples[i] for i in usable], spec, learner.rows * learner.row_tokens, share)
    return [[usable[i] for i in bin_] for bin_ in bins]


def collate(samples: Sequence[TrainSample], spec: ModelSpec, share: bool = False) -> PackedBatch:
    """Concatenate samples. share: store a common prompt once, which requires `packed_attention`."""
    lengths = [len(s.tokens) for s in samples]
    total = sum(lengths)
    positions = np.empty((4, total), dtype=np.int64)
    distinct: dict[bytes, int] = {}
    views: list[np.ndarray] = []
    starts: list[int] = [0]
    image_rows: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    start = 0
    # For each token of the samples: whether the row stores it, and the token that represents it there.
    stored, representative = np.ones(total, dtype=bool), np.arange(total)
    origins: dict[Hashable, int] = {}
    for sample, length in zip(samples, lengths, strict=True):
        sizes = [(view.shape[0], view.shape[1]) for view in sample.views]
        positions[0, start : start + length] = np.arange(length)
        positions[1:, start : start + length], _ = spec.family.positions(spec, sample.tokens, sizes)
        if share:
            prompt = prompt_of(sample, spec)
            origin = origins.setdefault(prompt.key, start)
            stored[start : start + prompt.length] = origin == start
            representative[start : start + prompt.length] = np.arange(origin, origin + prompt.length)
        start += length
        for view, digest in zip(sample.views, sample.digests, strict=True):
            if digest not in distinct:
                distinct[digest] = len(views)
                views.append(view)
                starts.append(starts[-1] + spec.image_tokens(view.shape[0], view.shape[1]))
            index = distinct[digest]
            image_rows.append(np.arange(starts[index], starts[index + 1]))
    tokens = np.concatenate([s.tokens for s in samples]).astype(np.int64)
    weights = [
        np.ones(len(s.tokens), np.float32) if s.weights is None else s.weights.astype(np.float32)
        for s in samples
    ]
    mask = np.concatenate([s.mask for s in samples]).astype(bool)
    places = (np.cumsum(stored) - 1)[representative]
    return PackedBatch(
        tokens=torch.from_numpy(tokens[stored]),
        positions=torch.from_numpy(positions[:, stored]),
        mask=torch.from_numpy(mask[stored]),
        targets=torch.from_numpy(tokens[mask]),
        previous=torch.from_numpy(places[np.flatnonzero(mask) - 1]),
        behaviour=torch.from_numpy(np.concatenate([s.log_probs for s in samples]).astype(np.float32)[stored]),
        weights=torch.from_numpy(np.concatenate(weights)[stored]),
        sequence=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)[stored]),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float32),
        policy_tokens=torch.tensor([s.policy_tokens for s in samples], dtype=torch.int64),
        segments=segment(lengths, places),
        views=views,
        digests=list(distinct),
        image_rows=torch.from_numpy(np.concatenate(image_rows)[stored[tokens == spec.image_token]]),
    )


def prompt_of(sample: TrainSample, spec: ModelSpec) -> Prompt:
    length = int(sample.mask.argmax())
    tokens = sample.tokens[:length]
    pads = int((tokens == spec.image_token).sum())
    sizes = np.cumsum([spec.image_tokens(view.shape[0], view.shape[1]) for view in sample.views])
    return Prompt((tokens.tobytes(), *sample.digests[: np.searchsorted(sizes, pads, side="right")]), length)


def segment(lengths: Sequence[int], places: np.ndarray | None = None) -> Segments:
    """Segments of consecutive samples. places: row index of each token; None: tokens are not shared."""
    places = np.arange(sum(lengths)) if places is None else places
    samples = np.split(places, np.cumsum(lengths)[:-1])
    buckets, _ = _buckets(samples)
    runs = buckets
    # Tokens of several samples are those of a prompt that they share.
    uses = np.bincount(places)
    shared = [(rows, int((uses[rows] > 1).sum())) for rows in samples]
    if prompts := {int(rows[0]): rows[:n] for rows, n in shared if n}:
        heads, order = _buckets([*prompts.values(), *(rows for rows, n in shared if not n)])
        tails, tail_order = _buckets([rows[n:] for rows, n in shared if n])
        numbers = dict(zip(prompts, np.argsort(order)[: len(prompts)], strict=True))
        continued = np.asarray([numbers[int(rows[0])] for rows, n in shared if n])[tail_order]
        of_tails = torch.from_numpy(continued).split([len(tail.rows) for tail in tails])
        runs = heads + [tail._replace(prompts=of) for tail, of in zip(tails, of_tails, strict=True)]
    inverse = _inverse(buckets, len(uses))
    run_inverse = _inverse(runs, len(uses)) if prompts else inverse
    return Segments([bucket.rows for bucket in buckets], inverse, runs, run_inverse)


def _buckets(parts: Sequence[Int[np.ndarray, " length"]]) -> tuple[list[Runs], Int[np.ndarray, " parts"]]:
    """Parts of similar length together, and the numbers of the parts in this order."""
    lengths = np.asarray([len(rows) for rows in parts])
    starts, flat = np.cumsum(lengths) - lengths, np.concatenate(parts)
    order = np.argsort(-lengths, kind="stable")
    buckets: list[Runs] = []
    place = 0
    while place < len(order):
        longest = lengths[order[place]]
        stop = place + int((lengths[order[place:]] >= BUCKET_RATIO * longest).sum())
        members = order[place:stop]
        sizes = lengths[members]
        within = np.minimum(np.arange(longest), sizes[:, None] - 1)
        rows = flat[starts[members][:, None] + within]
        buckets.append(Runs(torch.from_numpy(rows), torch.from_numpy(sizes), None))
        place = stop
    return buckets, order


def _inverse(buckets: Sequence[Runs], row: int) -> Int[Tensor, " row"]:
    """Place of each token of the row in the flattened buckets."""
    inverse = np.empty(row, dtype=np.int64)
    offset = 0
    for rows, sizes, _ in buckets:
        real = np.arange(rows.shape[1]) < sizes.numpy()[:, None]
        inverse[rows.numpy()[real]] = offset + np.flatnonzero(real)
        offset += rows.numel()
    return torch.from_numpy(inverse)
