"""Writes policies in the formats of other libraries: PEFT adapters, and merged Hugging Face model folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file
from torch import Tensor

from pixelis.errors import BadInput
from pixelis.families.spec import model_family
from pixelis.policy.lora import weight_updates

if TYPE_CHECKING:
    from pixelis.families.family import Family
    from pixelis.policy.adapters import Adapter

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Files of a model folder that a merged folder replaces."""


def checkpoint_files(path: str | Path) -> list[Path]:
    path = Path(path)
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def checkpoint_tensors(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in checkpoint_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                yield name, tensors.get_tensor(name)


class BaseFile:
    """The base model's parameters by their names in transformers, read on demand.

    transposed: stacked experts of published mixtures of experts, stored the other way round;
    unpublished: names in the files of those that are not stored as published.
    """

    def __init__(self, folder: str | Path, family: Family):
        self.folder = Path(folder)
        self.transposed: set[str] = set()
        self.unpublished: list[str] = []
        path = self.folder / "config.json"
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        hidden = int((settings.get("text_config") or settings).get("hidden_size", 0))
        self.locations: dict[str, tuple[Path, str]] = {}
        self.shapes: dict[str, torch.Tensor] = {}
        for file in checkpoint_files(folder):
            with safe_open(file, framework="pt") as tensors:
                for original in tensors.keys():  # noqa: SIM118 (no mapping)
                    name = family.parameter_name(original)
                    self.locations[name] = file, original
                    shape = list(tensors.get_slice(original).get_shape())
                    side = family.stacked.get(name.rsplit(".mlp.", 1)[-1])
                    if side is not None and shape[side] != hidden:
                        self.transposed.add(name)
                        shape[1], shape[2] = shape[2], shape[1]
                    if side is not None and (name in self.transposed) != family.published_transposed:
                        self.unpublished.append(original)
                    self.shapes[name] = torch.empty(shape, device="meta")

    def read(self, name: str) -> Float[Tensor, ...]:
        if name not in self.locations:
            raise BadInput(f"{self.folder} has no parameter {name}", code="foreign_model")
        file, original = self.locations[name]
        with safe_open(file, framework="pt") as tensors:
            return self.in_layout(name, tensors.get_tensor(original))

    def in_layout(self, name: str, value: Float[Tensor, ...]) -> Float[Tensor, ...]:
        """A parameter in transformers' layout from that of the file, or the reverse."""
        return value.transpose(1, 2) if name in self.transposed else value

    def updates(
        self, adapter: Adapter
    ) -> dict[str, tuple[Float[Tensor, "out rank"], Float[Tensor, "rank in"] | None]]:
        return weight_updates(self.shapes, replace(adapter, tensors=self._by_expert(adapter.tensors)))

    def _by_expert(self, tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Stacked experts as a matrix each, if the files store them so."""
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        out: dict[str, np.ndarray] = {}
        for name, value in tensors.items():
            stem, _, last = name.rpartition(".")
            if f"{stem}.0.{last.replace('gate_up', 'up')}.weight" not in self.locations:
                out[name] = value
                continue
            for expert, matrices in enumerate(value):
                for part, matrix in zip(parts[last], np.split(matrices, len(parts[last])), strict=True):
                    out[f"{stem}.{expert}.{part}.weight"] = matrix
        return out

    def write_merged(self, adapter: Adapter, path: Path, dtype: torch.dtype) -> Path:
        """Write the changed parameters under the checkpoint's names, rounded once to `dtype`."""
        merged: dict[str, torch.Tensor] = {}
        for name, (left, right) in self.updates(adapter).items():
            if right is not None:
                left = self.read(name).to(dtype).float() + left @ right
            merged[self.locations[name][1]] = self.in_layout(name, left).to(dtype).contiguous()
        path.parent.mkdir(parents=True, exist_ok=True)
        save_torch_file(merged, path)
        return path


def write_peft(
    adapter: Adapter,
    folder: Path,
    base_model: str | None = None,
    fold_scale: bool = False,
    text_only: bool = False,
) -> Path:
    """Write a LoRA adapter in PEFT's format; `folder` must not exist.

    fold_scale: multiply the scale into B in float32, for readers that use a narrower type; text_only: names
    of a model without vision.
    """
    if adapter.kind != "lora":
        raise BadInput(
            "the checkpoint holds all parameters, which are no adapter", fix="export a merged model instead"
        )
    folder.mkdir(parents=True)
    names = {
        module: module.replace("model.language_model.", "model.") if text_only else module
        for module in adapter.ranks
    }
    arrays: dict[str, np.ndarray] = {}
    folded, scale = (adapter.scale, 1.0) if fold_scale else (1.0, adapter.scale)
    for module in adapter.ranks:
        stem = f"base_model.model.{names[module]}"
        arrays[f"{stem}.lora_A.weight"] = np.ascontiguousarray(adapter.tensors[f"{module}.A"])
        # The product is a copy: vLLM modifies its tensors in place.
        arrays[f"{stem}.lora_B.weight"] = np.ascontiguousarray(
            adapter.tensors[f"{module}.B"] * np.float32(folded)
        )
    rank = max(adapter.ranks.values())
    others = {names[module]: r for module, r in adapter.ranks.items() if r != rank}
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": scale * rank,
        "rank_pattern": others,
        "alpha_pattern": {module: scale * r for module, r in others.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        # Full names: layers of the vision tower have the same last names.
        "target_modules": sorted(names.values()),
    }
    save_file(arrays, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return folder


def write_merged_model(
    adapter: Adapter, base: Path, folder: Path, dtype: torch.dtype | None = None, family: str | None = None
) -> Path:
    """Write a model folder like `base` with the policy's weights; `folder` must not exist.

    dtype: of the floating-point weights, None for that of each in `base`; family: `policy.family`.
    """
    source = BaseFile(base, model_family(base, family))
    updates = {
        source.locations[name][1]: (source.in_layout(name, left) if right is None else left, right)
        for name, (left, right) in source.updates(adapter).items()
    }
    copy_settings(base, folder)
    for path in checkpoint_files(base):
        tensors: dict[str, Tensor] = {}
        for name, tensor in checkpoint_tensors(path):
            target = (dtype or tensor.dtype) if tensor.is_floating_point() else tensor.dtype
            if name in updates:
                left, right = updates[name]
                tensor = left if right is None else tensor.float() + left @ right
            tensors[name] = tensor.to(target).contiguous()
        save_torch_file(tensors, folder / path.name, metadata={"format": "pt"})
    if dtype is not None:
        path = folder / "config.json"
        settings = json.loads(path.read_text(encoding="utf-8"))
        for section in (settings, settings.get("text_config", {}), settings.get("vision_config", {})):
            for key in {"dtype", "torch_dtype"} & section.keys():
                section[key] = str(dtype).removeprefix("torch.")
        path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return folder


def copy_settings(base: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    for path in sorted(base.iterdir()):
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES:
            shutil.copyfile(path, folder / path.name)
