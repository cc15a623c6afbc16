"""The critic of PPO (arXiv 1707.06347): a value head on the policy's detached hidden states."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from pixelis import config

HIDDEN = 256


class Critic:
    """Value of the state before each policy token."""

    def __init__(self, width: int, settings: config.CriticConfig, seed: int, device: torch.device):
        self.settings = settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            last = nn.Linear(HIDDEN, 1)
            self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, HIDDEN), nn.GELU(), last)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.head.to(device)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=settings.lr, weight_decay=0.0)

    def values(self, hidden: Float[Tensor, "tokens width"]) -> Float[Tensor, " tokens"]:
        return self.head(hidden.detach().float())[:, 0]

    def backward(
        self,
        hidden: Float[Tensor, "tokens width"],
        returns: Float[Tensor, " tokens"],
        old: Float[Tensor, " tokens"],
        weights: Float[Tensor, " tokens"],
    ) -> dict[str, float]:
        """Add the gradient of max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2; sums over tokens.

        old: values before the first step on the batch; weights: of each token.
        """
        values, clip = self.values(hidden), self.settings.clip
        errors = (values - returns).square()
        clipped = (torch.clamp(values, old - clip, old + clip) - returns).square()
        losses = 0.5 * torch.maximum(errors, clipped)
        (weights * losses).sum().backward()
        return {
            "critic_loss": float(losses.detach().sum()),
            "critic_clipped": float((clipped > errors).sum()),
        }

    def apply(self) -> None:
        """Take the optimizer step with all learners' gradients, unless they are not finite. Collective."""
        parameters = list(self.head.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if dist.get_world_size() > 1:
                dist.all_reduce(parameter.grad)
        if torch.isfinite(nn.utils.clip_grad_norm_(parameters, 1.0)):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, np.ndarray]:
        tensors = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in moments.items()}
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.head.load_state_dict(
            {n[5:]: torch.from_numpy(np.asarray(a)) for n, a in tensors.items() if n.startswith("head.")}
        )
        state: dict[int, dict[str, Tensor]] = {}
        for name in tensors:
            if name.startswith("optimizer."):
                _, index, moment = name.split(".", 2)
                value = torch.from_numpy(np.array(tensors[name]))
                # A scalar comes back from a file with one axis.
                state.setdefault(int(index), {})[moment] = value.reshape(()) if moment == "step" else value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
