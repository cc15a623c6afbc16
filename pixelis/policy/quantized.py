"""Writes int8 copies of models for vLLM: weights per output channel, activations per token at runtime (W8A8).

The format is that of compressed-tensors (`int-quantized`). Weights are rounded to the nearest step, which at 8 bits needs no
calibration data.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from jaxtyping import Float, Int8
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pixelis.errors import BadInput
from pixelis.policy.export import checkpoint_files, copy_settings, parameter_name

LARGEST = 127
QUANTIZED_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of the language model."""
SETTINGS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "linear": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
        }
    },
    "ignore": ["lm_head", "re:.*visual.*"],
}
"""``quantization_config`` of the copy. The vision tower and the head, which are sensitive and small, keep their type."""


def quantize(weight: Float[Tensor, "out in"]) -> tuple[Int8[Tensor, "out in"], Float[Tensor, "out 1"]]:
    """Round to the nearest of 255 steps in each row; weight ~ steps * scale. A row of zeros has scale 1."""
    values = weight.float()
    scale = values.abs().amax(1, keepdim=True) / LARGEST
    scale[scale == 0] = 1.0
    return (values / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def is_quantized_layer(name: str) -> bool:
    """Whether a parameter (its name in transformers) is the weight of a linear layer of the language model."""
    inside = name.startswith("model.language_model.layers.") and name.endswith(".weight")
    return inside and name.removesuffix(".weight").rpartition(".")[2] in QUANTIZED_LAYERS


def write_int8(base: Path, folder: Path) -> Path:
    """Write an int8 copy of a model folder; returns the folder, which must not exist. Holds one file of weights in memory.

    Raises BadInput for a model that is already quantised, or whose layers are none that the copy can store.
    """
    settings = json.loads((base / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in settings:
        raise BadInput(f"{base} is quantised already", fix="quantise the model with its original weights")
    copy_settings(base, folder)
    layers = sum(_write_file(path, folder / path.name) for path in checkpoint_files(base))
    if not layers:
        raise BadInput(f"{base} has no linear layers of a dense language model", fix="serve it without quantisation")
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": SETTINGS}, indent=2), encoding="utf-8")
    _write_index(folder)
    return folder


def _write_file(source: Path, target: Path) -> int:
    """Write one file of weights; returns its number of quantised layers."""
    tensors: dict[str, Tensor] = {}
    layers = 0
    with safe_open(source, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            tensor = file.get_tensor(name)
            if is_quantized_layer(parameter_name(name)):
                tensors[name], tensors[f"{name}_scale"] = quantize(tensor)
                layers += 1
            else:
                tensors[name] = tensor
    save_file(tensors, target, metadata={"format": "pt"})
    return layers


def _write_index(folder: Path) -> None:
    """Update the index of a model with several files, which names the file of each tensor."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return
    index = json.loads(path.read_text(encoding="utf-8"))
    places: dict[str, str] = {}
    size = 0
    for file in checkpoint_files(folder):
        with safe_open(file, framework="pt") as tensors:
            places |= dict.fromkeys(tensors.keys(), file.name)
        size += file.stat().st_size
    index |= {"weight_map": places, "metadata": {"total_size": size}}
    path.write_text(json.dumps(index, indent=2), encoding="utf-8")
