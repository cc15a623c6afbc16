"""A frozen base in 4 bit under LoRA: the language model's linear layers as NF4 (QLoRA, arXiv 2305.14314).

Adapters are never merged into a 4-bit weight, whose rounding would swallow them.
"""

from __future__ import annotations

import importlib.util
import types
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from pixelis.errors import MissingDependency, install_extra

if TYPE_CHECKING:
    from pixelis import config

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight with its share of the scales: one byte for 64 weights, a float32 for 256 of these."""
QUANTIZED = r"(.+\.)?(language_model|text_model)\.(?!.*(gate|in_proj_[ab])$)"
"""Names of the linear layers that are quantised: not routers, nor the decays of Gated DeltaNet."""


def check_installed() -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        message = "policy.quantization=nf4 needs bitsandbytes, which is not installed"
        raise MissingDependency(message, fix=install_extra("quant"))


def loading_options(policy: config.PolicyConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` for `policy.quantization`. Raises what `check_installed` raises."""
    if policy.quantization == "none":
        return {}
    check_installed()
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[f"(?!{QUANTIZED})"],
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if getattr(m, "quant_state", None) is not None}


def dense(weight: Tensor, state: Any) -> Float[Tensor, "out in"]:
    """The weight of a linear layer. state: of a quantised one, else None."""
    if state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight, state)


def set_product(layer: Any, product: tuple[Tensor, Tensor | None] | None) -> None:
    """Let a quantised layer compute W x + B (A x) with a product (scaled B, A); None: W x."""
    for name, factor in zip(("lora_b", "lora_a"), product or (None, None), strict=True):
        value = None if factor is None else factor.to(layer.weight.device, layer.quant_state.dtype)
        layer.register_buffer(name, value, persistent=False)
    layer.forward = types.MethodType(_with_product, layer)


def _with_product(self: Any, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
    out = type(self).forward(self, x)
    if self.lora_a is None:
        return out
    return out + functional.linear(functional.linear(x, self.lora_a), self.lora_b)
