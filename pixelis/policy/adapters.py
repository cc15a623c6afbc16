"""Adapters: the trainable weights of a policy version, as published, stored and validated."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from safetensors import safe_open

from pixelis.errors import BadInput, MissingFile
from pixelis.policy import tensor_parts
from pixelis.policy.checkpoint import is_complete, latest, write_folder
from pixelis.policy.peft_reader import read_peft
from pixelis.policy.tensor_parts import StoredTensors, files_of

if TYPE_CHECKING:
    from pixelis.config import PolicyConfig

FILES = {"lora": "adapter", "full": "model"}
"""Kind of an adapter -> stem of its safetensors files in a checkpoint."""
HASH_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Adapter:
    """The trainable part of a policy version.

    tensors: `{module}.A` float32 [rank, in] and `{module}.B` [out, rank] of each adapted layer; for kind
    `full` the parameters, float32 or the bits of bfloat16 as uint16. alpha / rank scales every layer.
    """

    tensors: Mapping[str, np.ndarray]
    alpha: int
    rank: int
    base_sha256: str
    kind: Literal["lora", "full"] = "lora"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.tensors.values())

    @property
    def ranks(self) -> dict[str, int]:
        """Rank of each adapted layer; empty for kind `full`."""
        tensors = sorted(self.tensors.items()) if self.kind == "lora" else ()
        return {name[:-2]: array.shape[0] for name, array in tensors if name.endswith(".A")}

    def sha256(self) -> str:

        def digest_of(name: str) -> bytes:
            array = np.ascontiguousarray(self.tensors[name])
            digest = hashlib.sha256(f"{name}{array.dtype}{array.shape}".encode())
            digest.update(array.data)
            return digest.digest()

        digest = hashlib.sha256(json.dumps(self.metadata(), sort_keys=True).encode())
        with ThreadPoolExecutor(HASH_THREADS if self.kind == "full" else 1) as pool:
            for part in pool.map(digest_of, sorted(self.tensors)):
                digest.update(part)
        return digest.hexdigest()

    def metadata(self) -> dict[str, str]:
        """Header of the safetensors file, with the rank and alpha of layers whose rank differs from `rank`."""
        header = {
            "kind": self.kind,
            "alpha": str(self.alpha),
            "rank": str(self.rank),
            "base_sha256": self.base_sha256,
        }
        other = {name: rank for name, rank in self.ranks.items() if rank != self.rank}
        if other:
            header["rank_pattern"] = json.dumps(other)
            header["alpha_pattern"] = json.dumps({name: self.scale * rank for name, rank in other.items()})
        return header


def to_float32(values: np.ndarray) -> np.ndarray:
    """Values of an adapter as float32; the bits of bfloat16 are the upper half of float32's."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values, np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of finite float32 values, rounded to the nearest bfloat16 (ties to even), as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def is_finite(values: np.ndarray) -> bool:
    """Whether all values are finite: not all bits of an exponent are set."""
    if values.dtype == np.uint16:
        return not ((values & 0x7F80) == 0x7F80).any()
    return bool(np.isfinite(values).all())


def is_vision(name: str) -> bool:
    """Whether a parameter or layer is of the vision tower: neither of the language model nor `lm_head`."""
    return not {"language_model", "text_model", "lm_head"} & set(name.split("."))


def adapter_bytes(
    shapes: Mapping[str, tuple[int, int]], rank: int | Mapping[str, int], width: int = 4
) -> int:
    ranks = dict.fromkeys(shapes, rank) if isinstance(rank, int) else rank
    return sum(r * sum(shapes[name]) * width for name, r in ranks.items())


def save_adapter(adapter: Adapter, folder: str | Path) -> None:
    write_folder(folder, lambda path: save_tensors(adapter, path))


def save_tensors(adapter: Adapter, folder: Path) -> None:
    path = folder / f"{FILES[adapter.kind]}.safetensors"
    tensor_parts.save_tensors(adapter.tensors, path, adapter.metadata())


def load_adapter(folder: str | Path, lazily: bool = False) -> Adapter:
    """The adapter of a checkpoint, of a run's best or else newest one, or of a folder in PEFT's format.

    lazily: read each tensor when it is used. MissingFile, BadInput.
    """
    if (Path(folder) / "adapter_config.json").is_file():
        tensors, alpha, rank = read_peft(Path(folder))
        return Adapter(tensors, alpha, rank, base_sha256="")  # which model it belongs to is unknown
    return read_adapter(*load_header(folder), lazily=lazily)


def read_adapter(files: list[Path], header: Mapping[str, str], lazily: bool = False) -> Adapter:
    tensors = StoredTensors(files)
    return adapter_of(tensors if lazily else dict(tensors), header)


def adapter_of(tensors: Mapping[str, np.ndarray], header: Mapping[str, str]) -> Adapter:
    kind: Literal["lora", "full"] = "full" if header["kind"] == "full" else "lora"
    return Adapter(tensors, int(header["alpha"]), int(header["rank"]), header["base_sha256"], kind)


def load_header(folder: str | Path, verify: bool = True) -> tuple[list[Path], dict[str, str]]:
    """(files, `Adapter.metadata`) of a checkpoint, or of a run's best or else newest one. Reads no tensors."""
    folder = Path(folder)
    if (folder / "checkpoints").is_dir():
        folder = folder / "best" if (folder / "best").is_dir() else latest(folder) or folder
    files = next((found for stem in FILES.values() if (found := files_of(folder, stem))), None)
    if files is None:
        fix = "name a run, a folder RUN/checkpoints/step_N, or a folder with PEFT's adapter_config.json"
        raise MissingFile(f"no adapter in {folder}", fix=fix)
    if not is_complete(folder, verify):
        message = f"{folder} is incomplete or damaged"
        raise BadInput(message, code="damaged_checkpoint", fix="use an older checkpoint of the run")
    with safe_open(files[0], framework="numpy") as file:
        header = dict(file.metadata() or {})
    if "kind" not in header:
        raise BadInput(f"{files[0]} was not written by pixelis: its header names no kind")
    return files, header


def check_adapter(
    adapter: Adapter, policy: PolicyConfig, base_sha256: str, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise BadInput unless the adapter fits the configuration, the base model and the parameters."""

    def foreign(message: str, fix: str) -> BadInput:
        return BadInput(message, code="foreign_adapter", fix=fix)

    if adapter.kind != ("full" if policy.full else "lora"):
        raise foreign(f"a {adapter.kind} checkpoint does not fit policy.full={policy.full}", "change the key")
    if adapter.base_sha256 and adapter.base_sha256 != base_sha256:
        raise foreign("the checkpoint belongs to another base model", "use its policy.model")
    lora = policy.lora
    fix = "use its policy.freeze_vision_tower, or the folder of `pixelis export --merge` as policy.model"
    if adapter.kind == "lora":
        if adapter.scale != lora.alpha / lora.rank or (adapter.rank != lora.rank and not lora.ranks):
            fix = f"set policy.lora.rank={adapter.rank} policy.lora.alpha={adapter.alpha}"
            raise foreign("the checkpoint has another rank or alpha", fix)
        targets = sorted({name.rsplit(".", 1)[-1] for name in adapter.ranks if not is_vision(name)})
        tower = str(any(map(is_vision, adapter.tensors))).lower()
        fix = f"set policy.lora.targets='[{', '.join(targets)}]' policy.lora.vision_tower={tower}, "
        fix += "and policy.lora.ranks as it was trained, or another run.dir"
        shapes = {name: shape for name, shape in shapes.items() if name[:-2] in adapter.ranks}
    if differing := sorted(set(adapter.tensors) ^ set(shapes)):
        raise foreign(f"the checkpoint and the configuration differ in {differing[0]}", fix)
    for name, shape in shapes.items():
        values = adapter.tensors[name]
        if values.shape != shape:
            message = f"{name} is {list(values.shape)} in the checkpoint, {list(shape)} by the configuration"
            raise foreign(message, fix)
        if not is_finite(values):
            raise BadInput(f"{name} holds values that are not finite", code="non_finite_adapter")


def without_change(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of an adapter with every B set to 0: the base model."""
    return {name: values * (not name.endswith(".B")) for name, values in weights.items()}
