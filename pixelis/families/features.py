"""Output of a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(slots=True)
class Features:
    """Features of some views. deepstack: visual input of early decoder layers (Qwen3-VL)."""

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
