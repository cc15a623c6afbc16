"""LoRA rank of each layer from a full fine-tune, and the file that stores the ranks.

The rank of a change D = W_tuned - W_base with singular values s is the smallest r with sum_{i<=r} s_i^2 >=
energy * ||D||_F^2. It is then bounded, rounded to a power of two above 16, and smoothed over layers of the
same type.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pixelis.config import VLLM_LORA_RANKS
from pixelis.errors import BadConfig, BadInput, MissingFile, first_problem
from pixelis.policy.adapters import is_vision

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from pixelis import config

POWERS_ABOVE = 16
TOP = 50
"""Singular values of a layer in a rank file."""
MAX_LORAS = 2
"""LoRA adapters that vLLM holds: the next one is loaded while the last one is in use."""
UNCHANGED = 1e-8
"""Largest change up to which a layer gets no adapter."""
EXACT_SIDE = 100
"""Largest side of a layer that is decomposed exactly; of a larger one COMPONENTS singular values are
computed.
"""
COMPONENTS, OVERSAMPLING, POWER_ITERATIONS = 512, 10, 4


@dataclass(frozen=True)
class WeightChange:
    """Change D of a layer's weight by fine-tuning.

    values: singular values, largest first; of a large layer the first COMPONENTS, empty for an unchanged
    layer. energy: ||D||_F^2; largest: max|D|.
    """

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
        return (
            -math.log(self.values[10] / self.values[0])
            if len(self.values) > 10 and self.values[10] > 0
            else None
        )

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> WeightChange:
        """Inverse of `to_json`."""
        return cls(**{**row, "shape": tuple(row["shape"]), "values": tuple(row["values"])})

    def to_json(self) -> dict[str, Any]:
        """Fields as JSON values."""
        return asdict(self)


def weight_change(
    base: Float[Tensor, "out in"],
    tuned: Float[Tensor, "out in"],
    seed: int = 42,
    components: int = COMPONENTS,
) -> WeightChange:
    """Decompose the change of a weight. Raises BadInput if the shapes differ or a value is not finite."""
    import torch  # not needed to read a rank file

    if base.shape != tuned.shape:
        raise BadInput(
            f"the base weight has the shape {list(base.shape)}, the tuned weight {list(tuned.shape)}",
            fix="set policy.model to the model that was tuned",
        )
    delta = tuned.float() - base.float()
    largest = float(delta.abs().max())
    energy = float(torch.linalg.vector_norm(delta, dtype=torch.float64)) ** 2
    shape = (int(delta.shape[0]), int(delta.shape[1]))
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
        _, values, _ = torch.svd_lowrank(
            delta, q=min(min(shape), count + OVERSAMPLING), niter=POWER_ITERATIONS
        )
    return WeightChange(shape, largest, energy, tuple(values[:count].tolist()), "randomised")


def energy_rank(change: WeightChange, share: float) -> int | None:
    """Smallest rank that retains this share of the energy; None if the computed values do not reach it."""
    if not change.values:
        return None
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


def layer_type(layer: str) -> str:
    """Last part of a layer's name: `q_proj` for `model.language_model.layers.3.self_attn.q_proj`."""
    return layer.rsplit(".", 1)[-1]


def _by_type(ranks: Mapping[str, int]) -> dict[str, list[int]]:
    result: defaultdict[str, list[int]] = defaultdict(list)
    for name, rank in ranks.items():
        result[layer_type(name)].append(rank)
    return dict(result)


# -- the rank file -------------------------------------------------------------------------------------------


class RankFile(BaseModel):
    """Content of ranks.json. total_parameters: of the adapters; compression_ratio: of the adapted layers to
    that.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer_ranks: dict[str, Annotated[int, Field(ge=1)]]
    layer_metadata: dict[str, dict[str, Any]] = {}
    analysis_metadata: dict[str, Any] = {}
    total_parameters: int = 0
    compression_ratio: float = 0.0

    @property
    def skipped(self) -> list[str]:
        """Analysed layers that fine-tuning did not change. They get no adapter."""
        return list(self.analysis_metadata.get("skipped", []))


def choose_ranks(
    changes: Mapping[str, WeightChange], settings: config.RanksConfig, metadata: Mapping[str, Any]
) -> RankFile:
    """Choose the rank of each changed layer. Raises BadInput if no layer has changed."""
    changed = {name: change for name, change in changes.items() if change.values}
    if not changed:
        raise BadInput(
            "no layer has changed: the tuned model equals its base",
            fix="name another checkpoint in ranks.tuned",
        )
    required = {name: energy_rank(change, settings.energy) for name, change in changed.items()}
    bounded = {
        name: bounded_rank(r or settings.largest, settings.smallest, settings.largest)
        for name, r in required.items()
    }
    ranks = {
        name: min(max(math.floor(rank + 0.5), settings.smallest), settings.largest, *changed[name].shape)
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
    parameters = sum(ranks[name] * sum(change.shape) for name, change in changed.items())
    weights = sum(math.prod(change.shape) for change in changed.values())
    energy = math.fsum(change.energy for change in changed.values())
    retained = math.fsum(changed[name].retained(rank) * changed[name].energy for name, rank in ranks.items())
    analysis = {
        **metadata,
        "settings": settings.model_dump(mode="json", exclude={"tuned"}),
        "type_medians": {kind: statistics.median(values) for kind, values in _by_type(ranks).items()},
        "type_means_before_smoothing": {
            kind: statistics.fmean(values) for kind, values in _by_type(bounded).items()
        },
        "energy_retained": retained / energy,
        "not_reached": sorted(name for name, r in required.items() if r is None),
        "skipped": sorted(set(changes) - set(changed)),
    }
    return RankFile(
        layer_ranks=ranks,
        layer_metadata=layers,
        analysis_metadata=analysis,
        total_parameters=parameters,
        compression_ratio=weights / parameters,
    )


def read(path: str | Path) -> RankFile:
    """Read a rank file. Raises MissingFile, and BadInput with the first invalid field."""
    path = Path(path)
    if not path.is_file():
        raise MissingFile(f"no rank file {path}", fix="create one with `pixelis ranks`")
    try:
        return RankFile.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = first_problem(error, RankFile.model_fields)
        message = f"{path} is not a rank file: {problem.path} {problem.message}"
        raise BadInput(message, fix="create one with `pixelis ranks`") from None


def ranks_of(lora: config.LoraConfig, layers: Iterable[str]) -> dict[str, int]:
    """Rank of each layer that gets an adapter: `lora.rank`, or its rank in the file `lora.ranks`.

    Files have no ranks for the vision tower, whose layers get `lora.rank`. Raises the errors of `read`, and
    BadConfig for a file of another model or of other targets.
    """
    layers = list(layers)
    if not lora.ranks:
        return dict.fromkeys(layers, lora.rank)
    file = read(lora.ranks)
    vision = {name: lora.rank for name in layers if is_vision(name)}
    layers = [name for name in layers if name not in vision]
    ranks = {name: rank for name, rank in file.layer_ranks.items() if layer_type(name) in lora.targets}
    if foreign := sorted(set(ranks) - set(layers)):
        raise BadConfig(
            f"policy.lora.ranks: the model has no layer {foreign[0]}",
            fix="use the rank file of this policy.model",
        )
    if missing := sorted(set(layers) - set(ranks) - set(file.skipped)):
        raise BadConfig(
            f"policy.lora.ranks has no rank for {missing[0]}",
            fix="use the rank file of this policy.model, created with the same policy.lora.targets",
        )
    if not ranks:
        raise BadConfig(
            "policy.lora.ranks gives no layer of policy.lora.targets an adapter",
            fix="check policy.lora.targets",
        )
    return {name: ranks[name] for name in layers if name in ranks} | vision


def largest_rank(lora: config.LoraConfig) -> int:
    """Largest rank of an adapter of this configuration."""
    if not lora.ranks:
        return lora.rank
    return max(
        (r for name, r in read(lora.ranks).layer_ranks.items() if layer_type(name) in lora.targets),
        default=lora.rank,
    )


def merges(policy: config.PolicyConfig, engine: config.EngineConfig) -> bool:
    """Whether vLLM loads merged weights.

    It cannot serve an adapter of the output layer or the vision tower.
    """
    return policy.full or engine.adapters == "merge" or not policy.lora.is_of_language_layers


def served_rank(rank: int) -> int:
    """Smallest rank of vLLM's kernels that holds adapters of this rank. Raises BadConfig if there is none."""
    if rank > max(VLLM_LORA_RANKS):
        message = f"a LoRA rank of {rank} is above vLLM's largest, {max(VLLM_LORA_RANKS)}"
        raise BadConfig(
            message,
            fix="lower ranks.largest and create policy.lora.ranks again, or set engine.adapters=merge",
        )
    return next(r for r in VLLM_LORA_RANKS if r >= rank)
