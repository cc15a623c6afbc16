"""The architecture of the embedded models: tiny configurations of transformers classes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from pixelis.errors import BadInput
from pixelis.families import NANO
from pixelis.families.quick_imports import quick_imports
from pixelis.families.spec import find_family, load_spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SIZES = {
    "hidden": 96,
    "layers": 3,
    "heads": 3,
    "kv_heads": 1,
    "feedforward": 240,
    "vision_hidden": 64,
    "vision_layers": 3,
    "vision_heads": 2,
    "vision_feedforward": 128,
    "experts": 4,
    "active_experts": 2,
    "patch": 8,
    "merge": 2,
    "view": 64,
    "positions": 4096,
}
"""Sizes of `nano`: a 64 x 64 view has 16 image tokens."""
MINI_SIZES = SIZES | {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 4, "feedforward": 384}
"""Sizes of `mini`, which starts as `nano`: the heads are as wide, and a layer is added."""


def build(
    tokenizer: PreTrainedTokenizerBase, family: str = NANO, seed: int = 0, **sizes: int
) -> PreTrainedModel:
    """A randomly initialised fp32 model on the CPU; ``sizes`` overrides entries of SIZES. BadInput, BadConfig."""
    unknown = sorted(set(sizes) - set(SIZES))
    if unknown:
        raise BadInput(f"unknown size {unknown[0]!r}", fix=f"use {', '.join(SIZES)}")
    size = {**SIZES, **sizes}
    own = find_family(family)
    values = own.tiny(tokenizer, size)
    with quick_imports():
        kind = getattr(transformers, own.architecture)
    config = kind.config_class(**values)
    torch.manual_seed(seed)
    model = kind._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    visual = getattr(model.model, "visual", None)
    if (positions := getattr(visual, "pos_embed", None)) is not None:
        with torch.no_grad():
            positions.weight.copy_(_grid_waves(size["view"] // size["patch"], size["vision_hidden"]))
    model.config.pixelis_nano = True
    text = model.config.get_text_config()
    model.generation_config.eos_token_id = text.eos_token_id
    model.generation_config.pad_token_id = text.pad_token_id
    model.generation_config.do_sample = False
    return model


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a checkpoint folder for `from_pretrained`: weights, tokenizer and image processor."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    spec = load_spec(folder, tokenizer)
    spec.family.save_processor(spec, folder, SIZES["view"] ** 2)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)


def _grid_waves(side: int, width: int) -> Float[Tensor, "positions width"]:
    """Sines and cosines of row and column, to initialise the position table."""
    frequencies = torch.exp(torch.linspace(math.log(0.5), math.log(math.pi * side / 2), width // 4))
    angles = torch.linspace(-1, 1, side)[:, None] * frequencies
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows, columns = axis[:, None].expand(side, side, -1), axis[None].expand(side, side, -1)
    return torch.cat([rows, columns], dim=-1).reshape(side * side, width) * 0.5 * math.sqrt(2)
