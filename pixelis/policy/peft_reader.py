"""Reads LoRA adapters in PEFT's format, as PEFT, TRL, LLaMA-Factory, ms-swift and `pixelis export` save them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open

from pixelis.errors import BadInput, MissingFile

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
VARIANTS = (
    *("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication"),
    *(
        "alora_invocation_tokens",
        "use_qalora",
        "use_bdlora",
        "arrow_config",
        "kasa_config",
        "monteclora_config",
    ),
)
"""Settings of PEFT with which the policy is more than W + scale B A of linear layers."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
"""Values of `init_lora_weights` with which PEFT changes the base model's weights too."""
MERGE = "merge it with PEFT (merge_and_unload, save_pretrained) and name the merged folder in policy.model"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
_VISION = "visual|vision_tower|multi_modal_projector|embed_vision"
_LAYER = re.compile(rf"(?:.*?\.)?(?:((?:{_VISION})\..+)|(layers\.\d+\..+)|(lm_head))")
"""The end of a layer's name that all versions of transformers share."""
_CURRENT = re.compile(r"model\.(?!layers\.).+")
"""A layer's name in current versions, also of models whose parts are called otherwise."""


def read_peft(folder: Path) -> tuple[dict[str, np.ndarray], int, int]:
    """The tensors, alpha and rank of an `Adapter` from a folder with `adapter_config.json`.

    Scales that differ between layers (rslora, `alpha_pattern`) are multiplied into B. BadInput for other
    methods than LoRA.
    """
    settings = _read_settings(folder / CONFIG)
    rank, lora_alpha = settings.r, settings.lora_alpha
    patterns = {
        re.compile(rf"(.*\.)?({key})"): value for key, value in (settings.alpha_pattern or {}).items()
    }
    alpha = int(lora_alpha) if lora_alpha >= 1 and lora_alpha.is_integer() else rank
    path = folder / WEIGHTS
    if not path.is_file():
        if (folder / "adapter_model.bin").is_file():
            fix = "load it with PEFT and save it with save_pretrained(safe_serialization=True)"
            message = f"{folder} has its weights in adapter_model.bin, a pickle, which is never loaded"
            raise BadInput(message, fix=fix)
        raise MissingFile(f"no {WEIGHTS} in {folder}", fix="name the folder that save_pretrained wrote")
    try:
        with safe_open(path, framework="pt") as file:  # numpy has no bfloat16
            arrays = {name: file.get_tensor(name).float().numpy() for name in sorted(file.keys())}
    except SafetensorError as error:
        message = f"{path} is damaged: {error}"
        raise BadInput(message, code="damaged_checkpoint", fix="copy it again") from None
    tensors = dict[str, np.ndarray]()
    for key, values in arrays.items():
        if key.endswith("lm_head.base_layer.weight"):
            continue  # of the base model: PEFT saves it beside an adapter of the head
        match = _TENSOR.fullmatch(key)
        layer = _LAYER.fullmatch(match[1]) if match else None
        current = _CURRENT.fullmatch(match[1]) if match else None
        if match is None or not (layer or current) or values.ndim != 2:
            shape = list(values.shape)
            message = f"{path} has {key} of the shape {shape}, which is no LoRA of a linear layer"
            raise BadInput(message, code="foreign_adapter", fix=MERGE)
        if layer is None or current is not None:
            name = match[1]
        else:
            vision, language, head = layer.groups()
            name = head or (f"model.{vision}" if vision else f"model.language_model.{language}")
        if f"{name}.{match[2]}" in tensors:
            message = f"{path} has several adapters of {name}"
            raise BadInput(message, code="foreign_adapter", fix="save each by itself")
        if match[2] == "B":
            names = (match[1], name)  # patterns may be of either version
            own = next(
                (value for pattern, value in patterns.items() if any(map(pattern.fullmatch, names))),
                lora_alpha,
            )
            width = values.shape[1]
            scale = own / (math.sqrt(width) if settings.use_rslora else width)
            values = values * np.float32(scale * rank / alpha)
        tensors[f"{name}.{match[2]}"] = values
    return tensors, alpha, rank


class _Settings(BaseModel):
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0)
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False


def _read_settings(path: Path) -> _Settings:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        method, start = values.get("peft_type"), str(values.get("init_lora_weights"))
        used = next((name for name in VARIANTS if values.get(name)), None)
        if method != "LORA":
            problem = f"is of the type {method}"
        elif used:
            problem = f"sets {used}, which policy.adapter does not support"
        elif start.startswith(CHANGES_BASE):
            problem = f"sets init_lora_weights={start}, which changes the base model too"
        else:
            return _Settings.model_validate(values)
    except (ValueError, AttributeError) as error:
        problem = f"cannot be read: {error}"
    raise BadInput(f"{path} {problem}", code="foreign_adapter", fix=MERGE)
