"""Input patches of the vision tower, and a faster attention for it.

`patchify` equals the image processors of transformers, which require torchvision. Without flash attention, transformers' Qwen
vision towers attend image by image in a Python loop; `batch_equal_windows` replaces the loop by a single call if all windows have
the same length, which is the case for views of one pixel budget.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional

from pixelis.errors import BadInput

if TYPE_CHECKING:
    from torch import nn

_ATTENTIONS = ("Qwen3VLVisionAttention", "Qwen2_5_VLVisionAttention")


def patchify(
    views: Sequence[UInt8[np.ndarray, "h w 3"]],
    patch: int,
    merge: int,
    temporal: int,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
) -> tuple[Float[Tensor, "patches values"], Int[Tensor, "views 3"]]:
    """pixel_values and grid_thw of views, equal to the Qwen2-VL and Qwen3-VL image processors of transformers.

    A row of pixel_values has 3 * temporal * patch * patch values; a row of grid_thw is (frames, rows, columns) in patches. Raises
    BadInput for a view whose sides are not multiples of patch * merge.
    """
    groups: list[torch.Tensor] = []
    grids: list[tuple[int, int, int]] = []
    shift, scale = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    position = 0
    while position < len(views):
        shape = views[position].shape
        if shape[0] % (patch * merge) or shape[1] % (patch * merge):
            message = f"the sides of a view of {shape[0]} x {shape[1]} are not multiples of {patch * merge}"
            raise BadInput(message, fix="resize it with pixel_budget.fit")
        stop = position
        while stop < len(views) and views[stop].shape == shape:
            stop += 1
        rows, columns = shape[0] // patch, shape[1] // patch
        pixels = torch.from_numpy((np.stack(views[position:stop]).astype(np.float32) / 255 - shift) / scale)
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
    """Replace the sdpa attention of a Qwen2.5-VL or Qwen3-VL vision tower. Windows of unequal length use transformers' attention.

    Returns the number of replaced layers. Idempotent.
    """
    changed = 0
    module: Any
    for module in model.modules():
        if type(module).__name__ not in _ATTENTIONS or module.config._attn_implementation != "sdpa":
            continue
        if not hasattr(module, "_stock_forward"):
            module._stock_forward = module.forward
            module.forward = types.MethodType(_batched_attention, module)
        changed += 1
    return changed


def _batched_attention(
    self: Any,
    hidden_states: Float[Tensor, "patches hidden"],
    cu_seqlens: Int[Tensor, " windows_plus_1"],
    position_embeddings: tuple[Float[Tensor, "patches width"], Float[Tensor, "patches width"]],
    **kwargs: object,
) -> Float[Tensor, "patches hidden"]:
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    count, length = len(lengths), int(lengths[0])
    if count < 2 or not bool((lengths == length).all()):
        return self._stock_forward(hidden_states, cu_seqlens=cu_seqlens, position_embeddings=position_embeddings, **kwargs)
    heads = self.num_heads
    query, key, value = self.qkv(hidden_states).view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    # [patches, width] -> [windows, 1, window length, width], float32 as in transformers.
    cos, sin = (table.view(count, 1, length, -1).float() for table in position_embeddings)
    attended = functional.scaled_dot_product_attention(
        _rotate(query, cos, sin), _rotate(key, cos, sin), value, scale=self.scaling
    )
    return self.proj(attended.transpose(1, 2).reshape(count * length, -1))


def _rotate(
    states: Float[Tensor, "windows heads length width"],
    cos: Float[Tensor, "windows 1 length width"],
    sin: Float[Tensor, "windows 1 length width"],
) -> Float[Tensor, "windows heads length width"]:
    half = states.shape[-1] // 2
    rotated = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return (states.float() * cos + rotated.float() * sin).to(states.dtype)
