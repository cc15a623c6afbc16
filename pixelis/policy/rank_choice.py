"""LoRA rank of each layer from a full fine-tune.

The smallest r with sum_{i<=r} s_i^2 >= energy * ||W_tuned - W_base||_F^2 for the singular values s of the
change, bounded, rounded to a power of two above 16, and smoothed over layers of the same type.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pixelis.errors import BadInput
from pixelis.policy.ranks import RankFile, layer_type

if TYPE_CHECKING:
    from pixelis import config

POWERS_ABOVE = 16
TOP = 50
UNCHANGED = 1e-8
"""Largest change up to which a layer gets no adapter."""
EXACT_SIDE = 100
"""Largest side of a layer that is decomposed exactly; of a larger one COMPONENTS values are computed."""
COMPONENTS, OVERSAMPLING, POWER_ITERATIONS = 512, 10, 4


@dataclass(frozen=True)
class WeightChange:
    """Change D of a layer's weight. values: singular values, largest first; energy: ||D||_F^2; largest: max|D|."""

    shape: tuple[int, int]
    largest: float
    energy: float
    values: tuple[float, ...]
    method: Literal["exact", "randomised", "none"]

    def retained(self, rank: int) -> float:
        """Lower bound of the share of the energy that the best approximation of this rank retains."""
        return min(1.0, math.fsum(s * s for s in self.values[:rank]) / self.energy) if self.energy else 1.0

    @property
    def decay(self) -> float | None:
        """-ln(s_10 / s_0), counted from 0; None with fewer values or if s_10 is 0."""
        if len(self.values) <= 10 or self.values[10] <= 0:
            return None
        return -math.log(self.values[10] / self.values[0])


def weight_change(
    base: Float[Tensor, "out in"],
    tuned: Float[Tensor, "out in"],
    seed: int = 42,
    components: int = COMPONENTS,
) -> WeightChange:
    """Decompose the change of a weight. Raises BadInput if the shapes differ or a value is not finite."""
    if base.shape != tuned.shape:
        raise BadInput(
            f"the base weight has the shape {list(base.shape)}, the tuned weight {list(tuned.shape)}",
            fix="set policy.model to the model that was tuned",
        )
    delta = tuned.float() - base.float()
    largest, shape = float(delta.abs().max()), (int(delta.shape[0]), int(delta.shape[1]))
    energy = float(torch.linalg.vector_norm(delta, dtype=torch.float64)) ** 2
    if not math.isfinite(energy):
        raise BadInput("the change of the weight has values that are not finite", fix="tune the model again")
    if largest <= UNCHANGED:
        return WeightChange(shape, largest, energy, (), "none")
    if min(shape) <= EXACT_SIDE:
        values = torch.linalg.svdvals(delta.double())
        return WeightChange(shape, largest, energy, tuple(values.tolist()), "exact")
    count = min(min(shape) - 1, components)
    with torch.random.fork_rng(devices=[delta.device] if delta.is_cuda else []):
        torch.manual_seed(seed)
        # Halko, Martinsson and Tropp (arXiv 0909.4061), algorithms 4.4 and 5.1.
        size = min(min(shape), count + OVERSAMPLING)
        _, values, _ = torch.svd_lowrank(delta, q=size, niter=POWER_ITERATIONS)
    return WeightChange(shape, largest, energy, tuple(values[:count].tolist()), "randomised")


def energy_rank(change: WeightChange, share: float) -> int | None:
    """Smallest rank that retains this share of the energy; None if the computed values do not reach it."""
    retained = np.cumsum(np.square(np.asarray(change.values, dtype=np.float64)))
    # Tolerance for float32 singular values at a share of 1
    enough = retained >= share * change.energy * (1 - 1e-7)
    return int(np.argmax(enough)) + 1 if enough.any() else None


def bounded_rank(rank: int, smallest: int, largest: int) -> int:
    """The rank within the bounds; above 16 rounded to a power of two by ratio."""
    rank = min(max(rank, smallest), largest)
    if rank <= POWERS_ABOVE:
        return rank
    power = 2 ** round(math.log2(rank))
    return max(power if power <= largest else power // 2, smallest)


def smoothed_ranks(ranks: Mapping[str, int], weight: float) -> dict[str, float]:
    """weight * mean rank of the layers of the same type + (1 - weight) * rank, for each layer."""
    means = {kind: statistics.fmean(values) for kind, values in _by_type(ranks).items()}
    return {name: weight * means[layer_type(name)] + (1 - weight) * rank for name, rank in ranks.items()}


def _by_type(ranks: Mapping[str, int]) -> dict[str, list[int]]:
    result: dict[str, list[int]] = {}
    for name, rank in ranks.items():
        result.setdefault(layer_type(name), []).append(rank)
    return result


def choose_ranks(
    changes: Mapping[str, WeightChange], settings: config.RanksConfig, metadata: Mapping[str, Any]
) -> RankFile:
    changed = {name: change for name, change in changes.items() if change.values}
    if not changed:
        raise BadInput("the tuned model equals its base", fix="name another checkpoint in ranks.tuned")
    smallest, largest = settings.smallest, settings.largest
    required = {name: energy_rank(change, settings.energy) for name, change in changed.items()}
    bounded = {name: bounded_rank(r or largest, smallest, largest) for name, r in required.items()}
    ranks = {
        name: min(max(math.floor(rank + 0.5), smallest), largest, *changed[name].shape)
        for name, rank in smoothed_ranks(bounded, settings.smoothing).items()
    }
    layers = {}
    for name, change in changed.items():
        rank, (out, inside) = ranks[name], change.shape
        layers[name] = {
            "type": layer_type(name),
            "shape": [out, inside],
            "method": change.method,
            "energy_rank": required[name],
            "reached": required[name] is not None,
            "bounded_rank": bounded[name],
            "rank": rank,
            "energy_retained": change.retained(rank),
            "frobenius_norm": math.sqrt(change.energy),
            "decay_rate": change.decay,
            "compression_ratio": out * inside / (rank * (out + inside)),
            "singular_values": list(change.values[:TOP]),
        }
    energy = math.fsum(change.energy for change in changed.values())
    retained = math.fsum(change.retained(ranks[name]) * change.energy for name, change in changed.items())
    parameters = sum(ranks[name] * sum(change.shape) for name, change in changed.items())
    means = {kind: statistics.fmean(values) for kind, values in _by_type(bounded).items()}
    analysis = {
        **metadata,
        "settings": settings.model_dump(mode="json", exclude={"tuned"}),
        "type_medians": {kind: statistics.median(values) for kind, values in _by_type(ranks).items()},
        "type_means_before_smoothing": means,
        "energy_retained": retained / energy,
        "not_reached": sorted(name for name, r in required.items() if r is None),
        "skipped": sorted(set(changes) - set(changed)),
    }
    return RankFile(
        layer_ranks=ranks,
        layer_metadata=layers,
        analysis_metadata=analysis,
        total_parameters=parameters,
        compression_ratio=sum(math.prod(change.shape) for change in changed.values()) / parameters,
    )
