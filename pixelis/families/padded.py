"""The forward pass of a packed row for models that know only batches: its samples padded at the right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pixelis.families.attention import Segments


def by_bucket(
    segments: Segments,
    forward: Callable[[Int[Tensor, "samples length"]], Float[Tensor, "samples length hidden"]],
) -> Float[Tensor, "1 row hidden"]:
    """Hidden states of a row from batches of its samples of similar length.

    forward: from the row index of each token of a batch to hidden states. The last token of a shorter sample
    is repeated behind it, where causal layers do not see it.
    """
    states = torch.cat([forward(bucket).flatten(0, 1) for bucket in segments.buckets])
    return states.index_select(0, segments.inverse).unsqueeze(0)
