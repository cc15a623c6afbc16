"""The vision tower's input, and a faster attention for it.

`patchify` turns views into the patches that the tower reads; the processors of transformers do the same but need torchvision to
load. `batch_equal_windows` batches the tower's attention. On a CPU (and wherever flash attention is missing) transformers' Qwen
vision towers attend image by image in a Python loop; when all windows are equally long, as views of one pixel budget are, the
same result comes from a single call.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from pixelis.errors import BadInput

if TYPE_CHECKING:
    from torch import nn

_ATTENTIONS = ("Qwen3VLVisionAttention", "Qwen2_5_VLVisionAttention")


def patchify(
    views: Sequence[np.ndarray],
    patch: int,
    merge: int,
    temporal: int,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views as the vision tower wants them, equal to the Qwen2-VL and Qwen3-VL image processors of transformers.

    views: uint8 [h, w, 3], sides multiples of patch * merge. Returns pixel_values float32
    [patches of all views, 3 * temporal * patch * patch] and grid_thw int64 [views, 3] (frames, rows, columns in patches).
    """
    groups: list[torch.Tensor] = []
    grids: list[tuple[int, int, int]] = []
    shift, scale = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    position = 0
    while position < len(views):
        shape = views[position].shape
        if shape[0] % (patch * merge) or shape[1] % (patch * merge):
            raise BadInput(f"a view of {shape[0]} x {shape[1]} is no multiple of {patch * merge}: pass it through fit() first")
        stop = position
        while stop < len(views) and views[stop].shape == shape:
            stop += 1
        rows, columns = shape[0] // patch, shape[1] // patch
        block = np.stack(views[position:stop]).astype(np.float32) / 255
        pixels = torch.from_numpy((block - shift) / scale)
        pixels = pixels.view(-1, rows // merge, merge, patch, columns // merge, merge, patch, 3)
        # -> views, row block, column block, row in block, column in block, channel, time, patch row, patch column
        pixels = pixels.permute(0, 1, 4, 2, 5, 7, 3, 6).unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, temporal, -1, -1)
        groups.append(pixels.reshape(-1, 3 * temporal * patch * patch))
        grids += [(1, rows, columns)] * (stop - position)
        position = stop
    if not groups:
        return torch.empty(0, 3 * temporal * patch * patch), torch.empty(0, 3, dtype=torch.int64)
    return torch.cat(groups), torch.tensor(grids, dtype=torch.int64)


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
