"""Output of a vision tower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


def by_size(
    encode: Callable[[list[Any]], Sequence[Features]], views: Sequence[Any], one_pass: bool
) -> list[Features]:
    """Features of each view, in order. encode: gets views of equal size, or with `one_pass` all."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, view in enumerate(views):
        groups.setdefault(() if one_pass else view.shape[:2], []).append(i)
    features: dict[int, Features] = {}
    for members in groups.values():
        features |= zip(members, encode([views[i] for i in members]), strict=True)
    return [features[i] for i in range(len(views))]
