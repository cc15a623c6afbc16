"""Embeddings by the frozen base model: states for coherence and curiosity, vectors for memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.linalg import hadamard
from torch.nn import functional

from pixelis.errors import DataFailure
from pixelis.policy.forward import PACKED, VisionLanguageModel, concatenate, encode_views, hidden_states
from pixelis.policy.packing import collate, pack
from pixelis.policy.samples import TrainSample, from_trajectory, unusable

if TYPE_CHECKING:
    from pixelis.dialogue.spec import ModelSpec
    from pixelis.records import Trajectory


def turn_ends(trajectory: Trajectory) -> list[int]:
    """Places of the tokens at which a state is taken: the last one before the first policy turn, and the last one of each policy
    turn together with the observation that follows it.
    """
    ends: list[int] = []
    length = 0
    for turn in trajectory.turns:
        if turn.is_policy:
            ends.append(length - 1)
        length += len(turn.tokens)
    # What lies before a policy turn is the state after the one before it; the end of the episode is the last state.
    return [*ends, length - 1]


@torch.no_grad()
def turn_states(
    model: VisionLanguageModel,
    spec: ModelSpec,
    trajectories: Sequence[Trajectory],
    views: Sequence[Sequence[np.ndarray]],
    row_tokens: int,
) -> list[np.ndarray | None]:
    """Hidden states of the last layer at ``turn_ends``, float32 [policy turns + 1, hidden size] for each trajectory.

    views: uint8 [h, w, 3] of each trajectory's images. None for a trajectory without policy turns or one the model cannot take.
    """
    out: list[np.ndarray | None] = [None] * len(trajectories)
    samples: list[tuple[int, TrainSample, list[int]]] = []
    for index, (trajectory, shown) in enumerate(zip(trajectories, views, strict=True)):
        if trajectory.policy_turns == 0:
            continue
        try:
            sample = from_trajectory(trajectory.model_copy(update={"advantage": 0.0}), list(shown))
        except DataFailure:
            continue
        if unusable(sample, spec, row_tokens) is None:
            samples.append((index, sample, turn_ends(trajectory)))
    device = next(model.parameters()).device
    ours = model.model.language_model.config._attn_implementation == PACKED
    for members in pack([len(sample.tokens) for _, sample, _ in samples], row_tokens):
        batch = collate([samples[i][1] for i in members], spec).to(device)
        features = None
        if batch.views:
            features = concatenate(encode_views(model, spec, batch.views)).rows(batch.image_rows)
        extra = {"segments": batch.segments} if ours else {}
        hidden = hidden_states(
            model, batch.tokens[None], batch.positions[:, None], features, spec.image_token, use_cache=False, **extra
        )[0]
        start = 0
        for i in members:
            index, sample, ends = samples[i]
            places = torch.tensor(ends, device=device) + start
            out[index] = hidden.index_select(0, places).float().cpu().numpy()
            start += len(sample.tokens)
    return out


GRID = 4
"""Cells a side into which a picture's features are averaged."""


def picture_vector(features: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A picture's direction, float32 [hidden size], of its image features [rows * columns, hidden size].

    The features are averaged into 4 x 4 cells, and channel c keeps its Walsh coefficient 1 + c mod 15 over the cells: where in
    the picture the channel is strong, not how strong it is. The mean over a picture, which is what usually is taken, says almost
    the same of all: of the embedded model's different pictures half have a cosine above .94, and the nearest of 300 is at .99,
    as near as the picture itself after JPEG. By these coefficients the nearest other is at .79 and the picture itself at .96.
    """
    cells = functional.adaptive_avg_pool2d(features.float().T.reshape(1, -1, rows, columns), GRID)[0].flatten(1)
    if rows * columns == 1:
        return cells[:, 0]
    patterns = torch.tensor(hadamard(GRID * GRID)[1:], dtype=torch.float32, device=cells.device)
    return (cells * patterns[torch.arange(len(cells), device=cells.device) % len(patterns)]).mean(1)


@torch.no_grad()
def question_parts(
    model: VisionLanguageModel, spec: ModelSpec, texts: Sequence[Sequence[int]], views: Sequence[Sequence[np.ndarray]]
) -> list[tuple[np.ndarray | None, np.ndarray | None]]:
    """Of each question its pictures' vector and its words', float32 [hidden size]; None without pictures or words.

    texts: token ids of the questions; views: uint8 [h, w, 3] of each one's own pictures. The visual part is the mean of the
    pictures' directions, the text part the mean of the tokens' embeddings.
    """
    flat = [view for shown in views for view in shown]
    features = encode_views(model, spec, flat) if flat else []
    sides = [(view.shape[0] // spec.multiple, view.shape[1] // spec.multiple) for view in flat]
    directions = [picture_vector(f.embeds, *side) for f, side in zip(features, sides, strict=True)]
    seen = iter([functional.normalize(d, dim=0).cpu().numpy() for d in directions])
    table = model.model.language_model.embed_tokens
    out = []
    for tokens, shown in zip(texts, views, strict=True):
        pictures = [next(seen) for _ in shown]
        visual = np.mean(pictures, axis=0) if pictures else None
        words = table(torch.tensor(list(tokens), device=table.weight.device)).float().mean(0).cpu().numpy() if tokens else None
        out.append((visual, words))
    return out
