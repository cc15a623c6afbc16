"""Embeddings from the frozen base model: states of turns for rewards, question vectors for memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from pixelis.errors import DataFailure
from pixelis.families.features import concatenate
from pixelis.policy.forward import VisionLanguageModel, packed_hidden_states
from pixelis.policy.packing import collate, pack
from pixelis.policy.samples import TrainSample, from_trajectory, unusable

if TYPE_CHECKING:
    from pixelis.families.family import ModelSpec
    from pixelis.records import Trajectory


GRID = 4
"""Side of the grid of cells over which `image_vector` averages an image's features."""


def turn_ends(trajectory: Trajectory) -> list[int]:
    """Positions of the last token before each policy turn, and of the last of all."""
    ends: list[int] = []
    length = 0
    for turn in trajectory.turns:
        if turn.is_policy:
            ends.append(length - 1)
        length += len(turn.tokens)
    return [*ends, length - 1]


@torch.no_grad()
def turn_states(
    model: VisionLanguageModel,
    spec: ModelSpec,
    trajectories: Sequence[Trajectory],
    views: Sequence[Sequence[UInt8[np.ndarray, "h w 3"]]],
    row_tokens: int,
) -> list[Float[np.ndarray, "policy_turns_plus_1 hidden"] | None]:
    """Hidden states at the `turn_ends` of each trajectory, float32; None for an unusable one."""
    out: list[np.ndarray | None] = [None] * len(trajectories)
    samples: list[tuple[int, TrainSample, list[int]]] = []
    for index, (trajectory, images) in enumerate(zip(trajectories, views, strict=True)):
        if trajectory.policy_turns == 0:
            continue
        try:
            # An episode may end with an observation, whose state is the last.
            sample = from_trajectory(trajectory, list(images), advantage=0.0, whole=True)
        except DataFailure:
            continue
        if unusable(sample, spec, row_tokens) is None:
            samples.append((index, sample, turn_ends(trajectory)))
    device = next(model.parameters()).device
    for members in pack([len(sample.tokens) for _, sample, _ in samples], row_tokens):
        batch = collate([samples[i][1] for i in members], spec).to(device)
        features = concatenate(spec.family.encode_views(model, spec, batch.views)) if batch.views else None
        hidden = packed_hidden_states(model, spec, batch, features)
        start = 0
        for i in members:
            index, sample, ends = samples[i]
            positions = torch.tensor(ends, device=device) + start
            out[index] = hidden.index_select(0, positions).float().cpu().numpy()
            start += len(sample.tokens)
    return out


def image_vector(
    features: Float[Tensor, "image_tokens hidden"], rows: int, columns: int
) -> Float[Tensor, " hidden"]:
    """Vector that tells images apart by where a channel is strong, float32, not normalised.

    Of features averaged over 4 x 4 cells, channel c becomes its Walsh coefficient 1 + c mod 15 over the
    cells.
    """
    cells = functional.adaptive_avg_pool2d(features.float().T.reshape(1, -1, rows, columns), GRID)[0].flatten(
        1
    )
    if rows * columns == 1:
        return cells[:, 0]
    from scipy.linalg import hadamard  # most processes that import this module need no vectors

    patterns = torch.tensor(hadamard(GRID * GRID)[1:], dtype=torch.float32, device=cells.device)
    return (cells * patterns[torch.arange(len(cells), device=cells.device) % len(patterns)]).mean(1)


def mean_feature(
    features: Float[Tensor, "image_tokens hidden"], rows: int, columns: int
) -> Float[Tensor, " hidden"]:
    """Mean over an image: what it shows, while `image_vector` tells images apart."""
    return features.float().mean(0)


@torch.no_grad()
def question_vectors(
    model: VisionLanguageModel,
    spec: ModelSpec,
    texts: Sequence[Sequence[int]],
    views: Sequence[Sequence[UInt8[np.ndarray, "h w 3"]]],
    pool: Callable[[Tensor, int, int], Tensor] = image_vector,
) -> list[tuple[Float[np.ndarray, " hidden"] | None, Float[np.ndarray, " hidden"] | None]]:
    """(mean of the normalised image vectors, mean of the token embeddings) of each question, float32 or None."""
    flat = [view for images in views for view in images]
    vectors = []
    for view, features in zip(flat, spec.family.encode_views(model, spec, flat) if flat else [], strict=True):
        rows, columns = spec.family.token_grid(spec, *view.shape[:2])
        vector = pool(features.embeds[: rows * columns], rows, columns)
        vectors.append(functional.normalize(vector, dim=0).cpu().numpy())
    ordered = iter(vectors)
    table = spec.family.language(model).get_input_embeddings()
    out = []
    for tokens, images in zip(texts, views, strict=True):
        visual = np.mean([next(ordered) for _ in images], axis=0) if images else None
        text = (
            table(torch.tensor(list(tokens), device=table.weight.device)).float().mean(0).cpu().numpy()
            if tokens
            else None
        )
        out.append((visual, text))
    return out
