"""A linear layer with its adapter as one operation.

peft computes x W^T + (x A^T) B^T * scale as five operations, each of which writes a tensor of the size of the output or of the
input and keeps some for the backward pass. Here the adapter's products are added inside the matrix product itself, and only the
input and x A^T, `rank` numbers for each token, are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from torch.autograd.function import once_differentiable
from torch.nn import functional

ADAPTER = "default"
"""peft's name for the only adapter of a model."""


class LoraLinear(lora.Linear):
    """peft's layer, with its parameters, names and values."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., in] -> [..., out], in the type of the frozen layer."""
        weight = self.base_layer.weight
        drops = self.training and isinstance(self.lora_dropout[ADAPTER], torch.nn.Dropout)
        # Under ZeRO-3 the weights are gathered by hooks on the submodules, which only peft's own forward enters.
        if drops or hasattr(weight, "ds_id"):
            return super().forward(x, *args, **kwargs)
        a, b = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        return _AdaptedLinear.apply(x, weight, self.base_layer.bias, a, b, self.scaling[ADAPTER])


class _AdaptedLinear(torch.autograd.Function):
    """x [..., in], frozen weight [out, in] and bias [out], A [rank, in], B [out, rank] -> [..., out].

    The adapter's part is computed in the type of A, which may be wider than that of the weight; the sum is rounded once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        low = flat.to(a.dtype) @ a.t()
        frozen = functional.linear(flat, weight, bias)
        out = _add_product(frozen, low, b.t(), scale)
        ctx.save_for_backward(flat, low, weight, a, b)
        ctx.scale, ctx.shape = scale, x.shape
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat, low, weight, a, b = ctx.saved_tensors
        gradient = gradient.reshape(-1, len(weight))
        wide = gradient.to(a.dtype)
        to_low = (wide @ b).mul_(ctx.scale)
        to_x = to_a = to_b = None
        if ctx.needs_input_grad[0]:
            to_x = _add_product(gradient @ weight, to_low, a, 1.0).view(ctx.shape)
        if ctx.needs_input_grad[3]:
            to_a = to_low.t() @ flat.to(a.dtype)
        if ctx.needs_input_grad[4]:
            to_b = (wide.t() @ low).mul_(ctx.scale)
        return to_x, None, None, to_a, to_b, None


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """total + scale * left @ right, in place where the types agree."""
    if total.dtype == left.dtype:
        return total.addmm_(left, right, alpha=scale)
    return torch.addmm(total.to(left.dtype), left, right, alpha=scale).to(total.dtype)
