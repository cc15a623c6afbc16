"""An LM head with a soft cap on its logits, as learner and engine call the head without its model."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


class CappedHead(nn.Linear):
    """Logits are cap * tanh(logits / cap) (Gemma 2, arXiv 2408.00118, section 2)."""

    cap: float

    def forward(self, hidden: Float[Tensor, "... width"]) -> Float[Tensor, "... vocab"]:
        return self.cap * torch.tanh(super().forward(hidden) / self.cap)


def cap_head(model: Any) -> None:
    """Move the cap from the model's forward pass into its head. The weight, which may be tied, stays as it is."""
    text = model.config.get_text_config()
    if text.final_logit_softcapping is not None:
        model.lm_head.__class__ = CappedHead
        model.lm_head.cap = text.final_logit_softcapping
        text.final_logit_softcapping = None
