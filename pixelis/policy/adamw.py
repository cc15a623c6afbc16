"""AdamW with moments in bfloat16: half the memory of torch's optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor

CHUNK = 2**24
"""Numbers updated at a time: the moments are float32 only here, so that their copies stay small."""
EPSILON = 1e-8


def round_at_random(values: Float[Tensor, " n"], generator: torch.Generator) -> BFloat16[Tensor, " n"]:
    """One of the two nearest bfloat16 numbers, so that the mean is `values` (arXiv 1502.02551, section 3.1)."""
    bits = values.view(torch.int32)
    bits += torch.randint(2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    bits &= -(2**16)
    return values.bfloat16()


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) with bfloat16 moments rounded at random, by the step alone."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    for moment in ("exp_avg", "exp_avg_sq"):
                        state[moment] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["step"] += 1
                step, device = int(state["step"]), parameter.device
                if device not in generators:
                    generators[device] = torch.Generator(device).manual_seed(step)
                tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                (beta1, beta2), lr = group["betas"], group["lr"]
                for values, gradient, exp_avg, exp_avg_sq in zip(
                    *(t.view(-1).split(CHUNK) for t in tensors), strict=True
                ):
                    gradient = gradient.float()
                    mean = exp_avg.float().lerp_(gradient, 1 - beta1)
                    square = exp_avg_sq.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                    denominator = (square / (1 - beta2**step)).sqrt_().add_(EPSILON)
                    values.mul_(1 - lr * group["weight_decay"]).addcdiv_(
                        mean, denominator, value=-lr / (1 - beta1**step)
                    )
                    exp_avg.copy_(round_at_random(mean, generators[device]))
                    exp_avg_sq.copy_(round_at_random(square, generators[device]))
