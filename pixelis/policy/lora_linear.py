"""A linear layer with a LoRA adapter as one autograd operation.

peft computes x W^T + (x A^T) B^T * scale in five operations, each of which writes a tensor as large as the input or the output.
Here the product with B is accumulated into x W^T, and only x and x A^T (`rank` numbers a token) are saved for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from peft.tuners import lora
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

ADAPTER = "default"
"""Name that peft gives the only adapter of a model."""


class LoraLinear(lora.Linear):
    """peft's LoRA layer with a faster forward and backward pass."""

    def forward(self, x: Float[Tensor, "... in"], *args: Any, **kwargs: Any) -> Float[Tensor, "... out"]:
        """Output in the type of the frozen layer."""
        # Under ZeRO-3, hooks on the submodules gather the weights, and only peft's own forward calls the submodules.
        return super().forward(x, *args, **kwargs) if hasattr(self.base_layer.weight, "ds_id") else self.product(x)

    def product(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """Output without a call of the submodules, whose weights must be complete."""
        weight, bias = self.base_layer.weight, self.base_layer.bias
        a, b, scale = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight, self.scaling[ADAPTER]
        if self.training and isinstance(self.lora_dropout[ADAPTER], torch.nn.Dropout):
            frozen = functional.linear(x, weight, bias)
            low = functional.linear(self.lora_dropout[ADAPTER](x.to(a.dtype)), a)
            return frozen + (functional.linear(low, b) * scale).to(frozen.dtype)
        return _AdaptedLinear.apply(x, weight, bias, a, b, scale)


class _AdaptedLinear(torch.autograd.Function):
    """Frozen linear layer plus adapter.

    The adapter's part is computed in the type of A, which may be wider than that of the weight; the sum is rounded once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "... in"],
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, " out"] | None,
        a: Float[Tensor, "rank in"],
        b: Float[Tensor, "out rank"],
        scale: float,
    ) -> Float[Tensor, "... out"]:
        flat = x.reshape(-1, x.shape[-1])
        low = flat.to(a.dtype) @ a.t()
        frozen = functional.linear(flat, weight, bias)
        out = _add_product(frozen, low, b.t(), scale)
        ctx.save_for_backward(flat, low, weight, a, b)
        ctx.scale, ctx.shape = scale, x.shape
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Float[Tensor, "... out"]) -> tuple[Tensor | None, ...]:
        flat, low, weight, a, b = ctx.saved_tensors
        gradient = gradient.reshape(-1, len(weight))
        wide = gradient.to(a.dtype)
        grad_low = (wide @ b).mul_(ctx.scale)
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = _add_product(gradient @ weight, grad_low, a, 1.0).view(ctx.shape)
        if ctx.needs_input_grad[3]:
            grad_a = grad_low.t() @ flat.to(a.dtype)
        if ctx.needs_input_grad[4]:
            grad_b = (wide.t() @ low).mul_(ctx.scale)
        return grad_x, None, None, grad_a, grad_b, None


def _add_product(
    total: Float[Tensor, "n m"], left: Float[Tensor, "n k"], right: Float[Tensor, "k m"], scale: float
) -> Float[Tensor, "n m"]:
    """total + scale * left @ right, in place if the types agree."""
    if total.dtype == left.dtype:
        return total.addmm_(left, right, alpha=scale)
    return torch.addmm(total.to(left.dtype), left, right, alpha=scale).to(total.dtype)
