"""LoRA ranks from a full fine-tune: each layer gets as many as its change needs, and what a rank file says about it.

The change D = W_tuned - W_base of a layer is decomposed, D = U diag(s) V'. Its rank is the smallest r with
sum_{i<=r} s_i^2 >= energy * ||D||_F^2: a randomised decomposition knows the largest s_i only, so the whole is the Frobenius norm,
never the sum over what was computed. Then bounds, powers of two above 16, and smoothing over layers of the same name.
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

if TYPE_CHECKING:
    import torch

    from pixelis import config

POWERS_ABOVE = 16
TOP = 50
"""Singular values of a layer that a rank file keeps."""
POWER_ITERATIONS = 4


@dataclass(frozen=True)
class Change:
    """How fine-tuning changed a layer.

    values: its singular values, falling, the largest `components` of a large layer; energy: ||D||_F^2; largest: max|D|, up to
    `unchanged` nothing was decomposed.
    """

    shape: tuple[int, int]
    largest: float
    energy: float
    values: tuple[float, ...]
    method: Literal["exact", "randomised", "none"]

    def retained(self, rank: int) -> float:
        """Share of the energy that the best approximation of this rank keeps, at least: what was not computed counts as lost."""
        return min(1.0, math.fsum(s * s for s in self.values[:rank]) / self.energy) if self.energy else 1.0

    @property
    def decay(self) -> float | None:
        """-ln(s_10 / s_0), counted from 0; None with fewer values or when s_10 is 0."""
        return -math.log(self.values[10] / self.values[0]) if len(self.values) > 10 and self.values[10] > 0 else None

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Change:
        """What `to_json` wrote."""
        return cls(**{**row, "shape": tuple(row["shape"]), "values": tuple(row["values"])})

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return asdict(self)


def change(base: torch.Tensor, tuned: torch.Tensor, settings: config.RanksConfig, seed: int = 42) -> Change:
    """What fine-tuning changed in a weight [out, in]. Raises BadInput when the shapes differ or a value is not finite."""
    import torch  # whoever only reads ranks does without

    if base.shape != tuned.shape:
        raise BadInput(
            f"the base is {list(base.shape)}, the tuned weight {list(tuned.shape)}",
            fix="set policy.model to the model that was tuned",
        )
    delta = tuned.float() - base.float()
    largest, energy = float(delta.abs().max()), float(torch.linalg.vector_norm(delta, dtype=torch.float64)) ** 2
    shape = (int(delta.shape[0]), int(delta.shape[1]))
    if not math.isfinite(energy):
        raise BadInput("the change holds values that are not finite")
    if largest <= settings.unchanged:
        return Change(shape, largest, energy, (), "none")
    if min(shape) <= settings.exact:
        values = torch.linalg.svdvals(delta.double())
        return Change(shape, largest, energy, tuple(values.tolist()), "exact")
    count = min(min(shape) - 1, settings.components)
    with torch.random.fork_rng(devices=[delta.device] if delta.is_cuda else []):
        torch.manual_seed(seed)
        # Halko, Martinsson and Tropp (arXiv 0909.4061), algorithms 4.4 and 5.1.
        _, values, _ = torch.svd_lowrank(delta, q=min(min(shape), count + settings.oversampling), niter=POWER_ITERATIONS)
    return Change(shape, largest, energy, tuple(values[:count].tolist()), "randomised")


def energy_rank(found: Change, share: float) -> int | None:
    """Smallest rank that keeps this share of the energy; None when the computed values do not reach it."""
    if not found.values:
        return None
    kept = np.cumsum(np.square(np.asarray(found.values, dtype=np.float64)))
    enough = kept >= share * found.energy * (1 - 1e-7)  # singular values in float32 lose the last digits of an energy of 1
    return int(np.argmax(enough)) + 1 if enough.any() else None


def bounded(rank: int, smallest: int, largest: int) -> int:
    """The rank within the bounds, above 16 the nearest power of two (by ratio) that is."""
    rank = min(max(rank, smallest), largest)
    if rank <= POWERS_ABOVE:
        return rank
    power = 2 ** round(math.log2(rank))
    return max(power if power <= largest else power // 2, smallest)


def smoothed(ranks: Mapping[str, int], weight: float) -> dict[str, float]:
    """weight * mean over the layers of the same name (q_proj, ...) + (1 - weight) * own rank."""
    means = {kind: statistics.fmean(values) for kind, values in _by_type(ranks).items()}
    return {name: weight * means[type_of(name)] + (1 - weight) * rank for name, rank in ranks.items()}


def type_of(layer: str) -> str:
    """The module's own name: `q_proj` of `model.language_model.layers.3.self_attn.q_proj`."""
    return layer.rsplit(".", 1)[-1]


def _by_type(values: Mapping[str, Any]) -> dict[str, list[Any]]:
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for name, value in values.items():
        found[type_of(name)].append(value)
    return dict(found)


# -- the rank file --------------------------------------------------------------------------------------------------------------


class RankFile(BaseModel):
    """Content of ranks.json. layer_ranks: layer -> rank; total_parameters: of adapters of these ranks.

    compression_ratio: numbers in the weights of these layers for one in their adapters.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer_ranks: dict[str, Annotated[int, Field(ge=1)]]
    layer_metadata: dict[str, dict[str, Any]] = {}
    analysis_metadata: dict[str, Any] = {}
    total_parameters: int = 0
    compression_ratio: float = 0.0

    @property
    def skipped(self) -> list[str]:
        """Layers that were analysed and had not changed: they get no adapter."""
        return list(self.analysis_metadata.get("skipped", []))


def decide(changes: Mapping[str, Change], settings: config.RanksConfig, about: Mapping[str, Any]) -> RankFile:
    """The rank file for what fine-tuning changed; about: what else is known of the analysis. Raises BadInput for no change."""
    moved = {name: found for name, found in changes.items() if found.values}
    if not moved:
        raise BadInput("no layer has changed: the tuned model is its base", fix="name another checkpoint in ranks.tuned")
    raw = {name: energy_rank(found, settings.energy) for name, found in moved.items()}
    own = {name: bounded(r or settings.largest, settings.smallest, settings.largest) for name, r in raw.items()}
    ranks = {
        name: min(max(math.floor(rank + 0.5), settings.smallest), settings.largest, *moved[name].shape)
        for name, rank in smoothed(own, settings.smoothing).items()
    }
    layers = {}
    for name, found in moved.items():
        rank, (out, inside) = ranks[name], found.shape
        layers[name] = {
            "type": type_of(name),
            "shape": [out, inside],
            "method": found.method,
            "energy_rank": raw[name],
            "reached": raw[name] is not None,
            "bounded_rank": own[name],
            "rank": rank,
            "energy_retained": found.retained(rank),
            "frobenius_norm": math.sqrt(found.energy),
            "decay_rate": found.decay,
            "compression_ratio": out * inside / (rank * (out + inside)),
            "singular_values": list(found.values[:TOP]),
        }
    total = sum(ranks[name] * sum(found.shape) for name, found in moved.items())
    whole = sum(math.prod(found.shape) for found in moved.values())
    energy = math.fsum(found.energy for found in moved.values())
    kept = math.fsum(moved[name].retained(rank) * moved[name].energy for name, rank in ranks.items())
    metadata = {
        **about,
        "settings": settings.model_dump(mode="json", exclude={"tuned"}),
        "type_medians": {kind: statistics.median(values) for kind, values in _by_type(ranks).items()},
        "type_means_before_smoothing": {kind: statistics.fmean(values) for kind, values in _by_type(own).items()},
        "energy_retained": kept / energy,
        "not_reached": sorted(name for name, r in raw.items() if r is None),
        "skipped": sorted(set(changes) - set(moved)),
    }
    return RankFile(
        layer_ranks=ranks,
        layer_metadata=layers,
        analysis_metadata=metadata,
        total_parameters=total,
        compression_ratio=whole / total,
    )


def read(path: str | Path) -> RankFile:
    """Read a rank file. Raises MissingFile for none, BadInput naming what is wrong in it."""
    path = Path(path)
    if not path.is_file():
        raise MissingFile(f"no rank file {path}", fix="pixelis ranks makes one")
    try:
        return RankFile.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = first_problem(error, RankFile.model_fields)
        raise BadInput(
            f"{path} is not a rank file: {problem.path} {problem.message}", fix="make one with `pixelis ranks`"
        ) from None


def ranks_of(lora: config.LoraConfig, layers: Iterable[str]) -> dict[str, int]:
    """Rank of each of a model's layers in `policy.lora.targets`: `lora.rank`, or what the file `lora.ranks` gives each.

    Layers that the file's analysis skipped get no adapter. Raises MissingFile, BadInput for a damaged file, BadConfig for one of
    another model or of other targets.
    """
    layers = list(layers)
    if not lora.ranks:
        return dict.fromkeys(layers, lora.rank)
    file = read(lora.ranks)
    given = {name: rank for name, rank in file.layer_ranks.items() if type_of(name) in lora.targets}
    if foreign := sorted(set(given) - set(layers)):
        raise BadConfig(f"policy.lora.ranks: the model has no layer {foreign[0]}", fix="use the rank file of this policy.model")
    if lacking := sorted(set(layers) - set(given) - set(file.skipped)):
        raise BadConfig(
            f"policy.lora.ranks says nothing about {lacking[0]}",
            fix="use the rank file of this policy.model, made with the same policy.lora.targets",
        )
    if not given:
        raise BadConfig("policy.lora.ranks gives no layer of policy.lora.targets an adapter", fix="check policy.lora.targets")
    return {name: given[name] for name in layers if name in given}


def largest_rank(lora: config.LoraConfig) -> int:
    """The largest rank that an adapter of this configuration has: what an engine must reserve."""
    if not lora.ranks:
        return lora.rank
    return max((r for name, r in read(lora.ranks).layer_ranks.items() if type_of(name) in lora.targets), default=lora.rank)


def merges(policy: config.PolicyConfig, engine: config.EngineConfig) -> bool:
    """Whether vLLM gets whole weights instead of adapters: it adapts the language model's layers, but not the output layer."""
    return policy.full or engine.adapters == "merge" or "lm_head" in policy.lora.targets


def served_rank(rank: int) -> int:
    """The rank that vLLM reserves for adapters of this one: the next that its kernels know. Raises BadConfig above them."""
    if rank > max(VLLM_LORA_RANKS):
        message = f"a LoRA rank of {rank} is above vLLM's largest, {max(VLLM_LORA_RANKS)}"
        raise BadConfig(message, fix="lower ranks.largest and make policy.lora.ranks again, or set engine.adapters=merge")
    return next(r for r in VLLM_LORA_RANKS if r >= rank)
