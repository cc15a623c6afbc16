"""Files for vLLM's processes: the model folder, adapters, and changed weights.

vLLM reads the model from a folder of links with our image processor settings, so that views of `fit` are not resized again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
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
from pixelis.policy.lora import weight_updates

if TYPE_CHECKING:
    from pixelis.dialogue.spec import ModelSpec
    from pixelis.policy.adapters import Adapter

PREFIX = "pixelis-vllm-"
OWNER = "PIXELIS_VLLM_OWNER"
"""Environment variable of vLLM's processes with the id of the process that started them."""
_PROCESSORS = {
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
}
_PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


class Scratch:
    """A folder in shared memory, or else in the temporary folder, for the lifetime of this process.

    A lock marks folders in use; folders of killed processes are removed here.
    """

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        for old in parent.glob(f"{PREFIX}*"):
            _remove_if_orphan(old)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Locked before it gets the name that other processes check.
        self._lock = os.open(self.path / "new", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.path / "new", self.path / "lock")

    def remove(self) -> None:
        """Delete the folder. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        shutil.rmtree(self.path, ignore_errors=True)


def _remove_if_orphan(folder: Path) -> None:
    try:
        lock = os.open(folder / "lock", os.O_RDWR)
    except OSError:  # another user's, or just being created or removed
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(lock)


def link_model(folder: Path, target: Path, spec: ModelSpec, min_pixels: int, max_pixels: int) -> Path:
    """Create a folder of links to the model's files, with image processor settings from `spec`; returns `target`.

    vLLM's processor does not resize views of min_pixels to max_pixels pixels whose sides are multiples of `spec.multiple`.
    """
    target.mkdir(parents=True)
    for file in folder.iterdir():
        if file.name not in _PROCESSOR_FILES:
            (target / file.name).symlink_to(file.resolve())
    processor, video = _PROCESSORS[spec.family]
    settings = {
        "processor_class": processor,
        "patch_size": spec.patch,
        "merge_size": spec.merge,
        "temporal_patch_size": spec.temporal,
        "image_mean": list(spec.image_mean),
        "image_std": list(spec.image_std),
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
    }
    image, film = {"image_processor_type": "Qwen2VLImageProcessor"}, {"video_processor_type": video}
    (target / "preprocessor_config.json").write_text(json.dumps({**settings, **image}))
    (target / "video_preprocessor_config.json").write_text(json.dumps({**settings, **film}))
    return target


def checkpoint_files(path: str | Path) -> list[Path]:
    """The safetensors files of a model folder, or the file itself."""
    path = Path(path)
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def checkpoint_tensors(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a checkpoint, read lazily."""
    for file in checkpoint_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                yield name, tensors.get_tensor(name)


def parameter_name(name: str) -> str:
    """The parameter name in transformers for the checkpoint's `name`; older checkpoints use shorter names."""
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.visual.", "model.language_model.")):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


class BaseFile:
    """The base model's parameters by their names in transformers; shapes are read on creation, values on demand."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.locations: dict[str, tuple[Path, str]] = {}
        self.shapes: dict[str, torch.Tensor] = {}
        for file in checkpoint_files(folder):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no mapping)
                    self.locations[parameter_name(name)] = file, name
                    shape = tensors.get_slice(name).get_shape()
                    self.shapes[parameter_name(name)] = torch.empty(shape, device="meta")

    def read(self, name: str) -> Float[Tensor, ...]:
        """Read one parameter. Raises BadInput for an unknown name."""
        if name not in self.locations:
            raise BadInput(f"{self.folder} has no parameter {name}", code="foreign_model")
        file, original = self.locations[name]
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(original)

    def updates(self, adapter: Adapter) -> dict[str, tuple[Float[Tensor, "out rank"], Float[Tensor, "rank in"] | None]]:
        """The changes of the adapter; see `lora.weight_updates`. Raises BadInput if it does not fit or is not finite."""
        return weight_updates(self.shapes, adapter)

    def write_merged(self, adapter: Adapter, path: Path, dtype: torch.dtype) -> Path:
        """Write the changed parameters under the checkpoint's names, merged in float32 and rounded once to `dtype`."""
        merged: dict[str, torch.Tensor] = {}
        for name, (left, right) in self.updates(adapter).items():
            if right is not None:
                left = self.read(name).to(dtype).float() + left @ right
            merged[self.locations[name][1]] = left.to(dtype).contiguous()
        path.parent.mkdir(parents=True, exist_ok=True)
        save_torch_file(merged, path)
        return path


def write_peft(adapter: Adapter, folder: Path) -> Path:
    """Write a LoRA adapter in peft's format with its scale multiplied into B; returns the folder.

    Layers may have different ranks; the largest is written as the adapter's.
    """
    folder.mkdir(parents=True)
    arrays: dict[str, np.ndarray] = {}
    modules = sorted({name[:-2] for name in adapter.tensors})
    for module in modules:
        stem = f"base_model.model.{module}"
        arrays[f"{stem}.lora_A.weight"] = np.ascontiguousarray(adapter.tensors[f"{module}.A"])
        # The product is a copy: vLLM modifies its tensors in place.
        arrays[f"{stem}.lora_B.weight"] = np.ascontiguousarray(adapter.tensors[f"{module}.B"] * np.float32(adapter.scale))
    rank = max(adapter.tensors[f"{module}.A"].shape[0] for module in modules)
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({module.rsplit(".", 1)[-1] for module in modules}),
    }
    save_file(arrays, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
