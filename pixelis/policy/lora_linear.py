"""A linear layer with a LoRA adapter as one autograd operation.

peft's five operations each write a large tensor. Here B's product is accumulated into x W^T, and only x and x
A^T are saved. A 4-bit weight is dequantised again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from pixelis.families.quick_imports import quick_imports
from pixelis.policy.quantization import dense

with quick_imports():
    from peft.tuners import lora

ADAPTER = "default"


class LoraLinear(lora.Linear):
    """A linear layer with one adapter."""

    def forward(self, x: Float[Tensor, "... in"], *args: Any, **kwargs: Any) -> Float[Tensor, "... out"]:
        if not hasattr(self.base_layer.weight, "ds_id"):
            return self.product(x)
        # Under ZeRO-3, hooks on the submodules gather the weights. peft would compute the product in float32, the
        # type of the adapter (67 instead of 989 TFLOPS on an H100, by its data sheet).
        with torch.autocast(x.device.type, x.dtype, enabled=x.dtype != torch.float32):
            low = self.lora_A[ADAPTER](self.lora_dropout[ADAPTER](x))
            return self.base_layer(x) + self.lora_B[ADAPTER](low) * self.scaling[ADAPTER]

    def product(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """Output without a call of the submodules, whose weights must be complete."""
        weight, bias = self.base_layer.weight, self.base_layer.bias
        state = getattr(self.base_layer, "quant_state", None)
        a, b, scale = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight, self.scaling[ADAPTER]
        if self.training and isinstance(self.lora_dropout[ADAPTER], torch.nn.Dropout):
            low = functional.linear(self.lora_dropout[ADAPTER](x), a.to(x.dtype))
            frozen = functional.linear(x, weight, bias) if state is None else self.base_layer(x)
            return frozen + functional.linear(low, b.to(x.dtype)) * scale
        return _AdaptedLinear.apply(x, weight, bias, a, b, scale, state)


class _AdaptedLinear(torch.autograd.Function):
    """Frozen linear layer plus adapter, which is computed in the type of the frozen weight, as in vLLM."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "... in"],
        weight: Tensor,
        bias: Float[Tensor, " out"] | None,
        a: Float[Tensor, "rank in"],
        b: Float[Tensor, "out rank"],
        scale: float,
        state: Any,
    ) -> Float[Tensor, "... out"]:
        flat = x.reshape(-1, x.shape[-1])
        low = flat @ a.to(x.dtype).t()
        out = functional.linear(flat, dense(weight, state), bias)
        out.addmm_(low, b.to(x.dtype).t(), alpha=scale)
        ctx.save_for_backward(flat, low, weight, a, b)
        ctx.scale, ctx.shape, ctx.state = scale, x.shape, state
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Float[Tensor, "... out"]) -> tuple[Tensor | None, ...]:
        flat, low, weight, a, b = ctx.saved_tensors
        gradient = gradient.reshape(-1, gradient.shape[-1])
        grad_low = (gradient @ b.to(gradient.dtype)).mul_(ctx.scale)
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = (
                (gradient @ dense(weight, ctx.state)).addmm_(grad_low, a.to(gradient.dtype)).view(ctx.shape)
            )
        if ctx.needs_input_grad[3]:
            grad_a = (grad_low.t() @ flat).to(a.dtype)
        if ctx.needs_input_grad[4]:
            grad_b = (gradient.t() @ low).mul_(ctx.scale).to(b.dtype)
        return grad_x, None, None, grad_a, grad_b, None, None
