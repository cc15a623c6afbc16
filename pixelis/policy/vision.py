"""One batched attention for images of equal size.

On a CPU (and wherever flash attention is missing) transformers' Qwen vision towers attend image by image in a Python loop. When
all windows are equally long, as views of one pixel budget are, the same result comes from a single call.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import nn

_ATTENTIONS = ("Qwen3VLVisionAttention", "Qwen2_5_VLVisionAttention")


def batch_equal_windows(model: nn.Module) -> int:
    """Replace the attention of the model's vision tower (Qwen2.5-VL, Qwen3-VL); windows of unequal length take the stock path.

    Returns how many layers were changed (0 when the tower uses another attention or flash attention). Safe to call twice.
    """
    changed = 0
    module: Any
    for module in model.modules():
        if type(module).__name__ not in _ATTENTIONS or module.config._attn_implementation != "sdpa":
            continue
        if not hasattr(module, "_stock_forward"):
            module._stock_forward = module.forward
            module.forward = types.MethodType(_attend, module)
        changed += 1
    return changed


def _attend(
    self: Any,
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **kwargs: object,
) -> torch.Tensor:
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    count, length = len(lengths), int(lengths[0])
    if count < 2 or not bool((lengths == length).all()):
        return self._stock_forward(hidden_states, cu_seqlens=cu_seqlens, position_embeddings=position_embeddings, **kwargs)
    heads = self.num_heads
    query, key, value = self.qkv(hidden_states).view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    # cos and sin: [tokens, head width] -> [windows, 1, window length, head width], float32 as in the stock rotation.
    cos, sin = (table.view(count, 1, length, -1).float() for table in position_embeddings)
    attended = functional.scaled_dot_product_attention(
        _rotate(query, cos, sin), _rotate(key, cos, sin), value, scale=self.scaling
    )
    return self.proj(attended.transpose(1, 2).reshape(count * length, -1))


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = states.shape[-1] // 2
    turned = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return (states.float() * cos + turned.float() * sin).to(states.dtype)
