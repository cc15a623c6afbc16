"""The file that stores a LoRA rank for each layer, and the ranks that the learner and vLLM use."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pixelis.config import VLLM_LORA_RANKS
from pixelis.errors import BadConfig, BadInput, MissingFile, first_problem
from pixelis.policy.adapters import is_vision

if TYPE_CHECKING:
    from pixelis import config

MAX_LORAS = 2
"""LoRA adapters that vLLM holds: the next one is loaded while the last one is in use."""


class RankFile(BaseModel):
    """Content of ranks.json. compression_ratio: parameters of the adapted layers to those of the adapters."""

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


def layer_type(layer: str) -> str:
    """Last part of a layer's name: `q_proj` for `model.language_model.layers.3.self_attn.q_proj`."""
    return layer.rsplit(".", 1)[-1]


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

    Layers of the vision tower, which files leave out, get `lora.rank`.
    """
    if not lora.ranks:
        return dict.fromkeys(layers, lora.rank)
    file, layers = read(lora.ranks), list(layers)
    ranks = {name: rank for name, rank in file.layer_ranks.items() if lora.adapts(layer_type(name))}
    ranks |= {name: lora.rank for name in layers if is_vision(name)}
    fix = "use the rank file of this policy.model, created with the same policy.lora.targets"
    if foreign := sorted(set(ranks) - set(layers)):
        raise BadConfig(f"policy.lora.ranks: the model has no layer {foreign[0]}", fix=fix)
    if missing := sorted(set(layers) - set(ranks) - set(file.skipped)):
        raise BadConfig(f"policy.lora.ranks has no rank for {missing[0]}", fix=fix)
    if not ranks:
        raise BadConfig("policy.lora.ranks gives no layer an adapter", fix="check policy.lora.targets")
    return {name: ranks[name] for name in layers if name in ranks}


def largest_rank(lora: config.LoraConfig) -> int:
    if not lora.ranks:
        return lora.rank
    ranks = read(lora.ranks).layer_ranks.items()
    return max((rank for name, rank in ranks if lora.adapts(layer_type(name))), default=lora.rank)


def merges(policy: config.PolicyConfig, engine: config.EngineConfig) -> bool:
    """Whether vLLM loads merged weights: it serves no adapter of the output layer."""
    return policy.full or engine.adapters == "merge" or "lm_head" in policy.lora.targets


def served_rank(rank: int) -> int:
    """Smallest rank of vLLM's kernels that holds adapters of this rank. Raises BadConfig if there is none."""
    if rank > max(VLLM_LORA_RANKS):
        raise BadConfig(
            f"a LoRA rank of {rank} is above vLLM's largest, {max(VLLM_LORA_RANKS)}",
            fix="lower ranks.largest and create policy.lora.ranks again, or set engine.adapters=merge",
        )
    return next(r for r in VLLM_LORA_RANKS if r >= rank)
