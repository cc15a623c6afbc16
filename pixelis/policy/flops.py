"""Floating-point operations of a training step, for MFU, as in PaLM (arXiv 2204.02311, appendix B).

A matrix of N weights costs 2 N operations a token in the forward pass, and again for the gradients of its
input and of its weights; attention counts whole squares, recomputation and a frozen tower nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pixelis.policy.adapters import is_vision

if TYPE_CHECKING:
    from pixelis.policy.forward import VisionLanguageModel
    from pixelis.policy.packing import PackedBatch

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 6000 Ada": 364.0,
    "RTX 4090": 165.0,
    "A10": 125.0,
    "L4": 121.0,
    "RTX 3090": 71.0,
}
"""Dense bfloat16 operations per second in 10^12, by a part of the GPU's name (NVIDIA's data sheets)."""


def peak_flops(device: torch.device, tflops: float | None = None) -> float | None:
    """Operations per second of a device; None if unknown. tflops: overrides the table."""
    if tflops is not None:
        return tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * value for part, value in PEAK_TFLOPS.items() if part in name), None)


class FlopCounter:
    """Counts the operations of training steps of a model. patch: side of an image patch in pixels."""

    def __init__(self, model: VisionLanguageModel, patch: int):
        self.patch = patch
        text = model.config.get_text_config()
        self.attention = 4 * attention_widths(model)[0]
        self.states = 0
        if states := list(getattr(text, "layer_types", None) or ()).count("linear_attention"):
            matrix = text.linear_key_head_dim * text.linear_value_head_dim
            # The delta rule reads a matrix twice and updates it once.
            self.states = 6 * states * text.linear_num_value_heads * matrix
        active = active_experts(text) / max(1, getattr(text, "num_experts", None) or 0)
        tower = [parameter for name, parameter in model.named_parameters() if is_vision(name)]
        self.head = _per_token(model, lambda name: name.startswith("lm_head"))
        self.vision = _per_token(model, is_vision) if any(p.requires_grad for p in tower) else 0
        self.layers = _per_token(
            model, lambda name: not (name.startswith("lm_head") or is_vision(name)), active
        )

    def step(self, batch: PackedBatch, lengths: Sequence[int], workers: int = 1) -> float:
        """Operations of a micro-batch. workers: that divide its row."""
        patches = sum(view.shape[0] * view.shape[1] for view in batch.views) // self.patch**2
        return self.count(len(batch.tokens), sum(batch.policy_tokens.tolist()), lengths, patches, workers)

    def count(
        self, tokens: int, policy_tokens: int, lengths: Sequence[int], patches: int = 0, workers: int = 1
    ) -> float:
        """Operations for tokens and images, and 1 / `workers` of those for logits and attention."""
        whole = self.head * policy_tokens + 3 * self.attention * sum(length**2 for length in lengths)
        return float((self.layers + 3 * self.states) * tokens + self.vision * patches + whole / workers)


def active_experts(text: Any) -> int:
    """Experts of a layer that a token passes, 0 without experts. text: configuration; Gemma's has a name of its own."""
    return getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 0


def attention_widths(model: nn.Module) -> tuple[int, int]:
    """Widths of the queries and of the keys of a language model's layers, summed; some layers share others' keys."""
    layers = [(name, module) for name, module in model.named_modules() if not is_vision(name)]
    queries = sum(int(module.in_features) for name, module in layers if name.endswith(".o_proj"))
    return queries, sum(int(module.out_features) for name, module in layers if name.endswith(".k_proj"))


def _per_token(model: nn.Module, counts: Callable[[str], bool], active: float = 1.0) -> int:
    """counts: whether a module or parameter is part of it; active: share of the experts that a token passes."""

    def size(parameter: Any) -> int:
        return int(getattr(parameter, "ds_numel", parameter.numel()))  # divided by ZeRO-3

    matrices: list[tuple[Any, float]] = []
    for name, m in model.named_modules():
        if counts(name) and isinstance(m, nn.Linear):
            matrices.append((m.weight, m.in_features * m.out_features))  # a 4-bit weight is packed
        elif counts(name) and type(m).__name__.endswith("TopKRouter"):
            matrices.append((m.weight, size(m.weight)))
    experts = ("experts.gate_up_proj", "experts.down_proj")
    matrices += [
        (p, active * size(p))
        for name, p in model.named_parameters()
        if name.endswith(experts) and counts(name)
    ]
    return round(sum(2 * (3 if weight.requires_grad else 2) * count for weight, count in matrices))
