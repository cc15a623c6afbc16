"""Input patches of the vision tower without torchvision, and an attention without a Python loop over windows."""

from __future__ import annotations

import itertools
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from torch import nn

Heads = Float[Tensor, "patches heads width"]
_LONGEST = WeakTensorKeyDictionary()


def patchify(
    views: Sequence[UInt8[np.ndarray, "h w 3"]],
    patch: int,
    merge: int,
    temporal: int,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    device: torch.device | str = "cpu",
) -> tuple[Float[Tensor, "patches values"], Int[Tensor, "views 3"]]:
    """pixel_values and grid_thw (frames, rows, columns in patches) as Qwen's image processors give them.

    The sides of a view are multiples of patch * merge.
    """
    patches: list[torch.Tensor] = []
    grids: list[tuple[int, int, int]] = []
    shift, scale = (torch.tensor(values, device=device).view(3, 1, 1) for values in (mean, std))
    brightest = torch.full_like(scale, 255)
    for shape, group in itertools.groupby(views, key=np.shape):
        rows, columns = shape[0] // patch, shape[1] // patch
        pixels = torch.from_numpy(np.stack([*group])).to(device)
        grids += [(1, rows, columns)] * len(pixels)
        pixels = pixels.view(-1, rows // merge, merge, patch, columns // merge, merge, patch, 3)
        # -> views, row block, column block, row in block, column in block, channel, patch row, patch column
        pixels = pixels.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(-1, 3, 1, patch * patch)
        values = pixels.float().div_(brightest).sub_(shift).div_(scale)
        patches.append(values.expand(-1, -1, temporal, -1).reshape(-1, 3 * temporal * patch * patch))
    return torch.cat(patches), torch.tensor(grids, dtype=torch.int64, device=device)


def batch_windows(model: nn.Module) -> int:
    """Replace the sdpa attention of a vision tower; returns the number of replaced layers.

    The classes of all Qwen families have the same weights and arguments.
    """
    changed = 0
    module: Any
    for module in model.modules():
        if type(module).__name__.endswith("VisionAttention") and module.config._attn_implementation == "sdpa":
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
    query, key, value = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1).unbind(1)
    # float32, as in transformers.
    cos, sin = (table.unsqueeze(1).float() for table in position_embeddings)
    query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    # The kernel needs an Ampere GPU or a newer one.
    if (
        query.is_cuda
        and query.dtype != torch.float32
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    ):
        from torch.nn.attention.varlen import varlen_attn

        # Cached: all layers share the tensor, and reading it waits for the GPU's pending work.
        if cu_seqlens not in _LONGEST:
            _LONGEST[cu_seqlens] = int(cu_seqlens.diff().max())
        longest = int(_LONGEST[cu_seqlens])
        attended: Any = varlen_attn(
            query, key, value, cu_seqlens, cu_seqlens, longest, longest, scale=self.scaling
        )
    else:
        attended = _attend_by_length(query, key, value, cu_seqlens.tolist(), self.scaling)
    return self.proj(attended.reshape(hidden_states.shape))


def _attend_by_length(
    query: Heads,
    key: Heads,
    value: Heads,
    edges: list[int],
    scale: float,
) -> Heads:
    """Attention inside windows, those of one length together."""
    starts: dict[int, list[int]] = {}
    for start, stop in itertools.pairwise(edges):
        starts.setdefault(stop - start, []).append(start)
    heads, width = query.shape[1:]
    out = torch.empty_like(query) if len(starts) > 1 else query
    for length, first in starts.items():
        rows = None
        if len(starts) > 1:
            offsets = torch.arange(length, device=query.device)
            rows = (torch.tensor(first, device=query.device)[:, None] + offsets).reshape(-1)
        parts = (t if rows is None else t.index_select(0, rows) for t in (query, key, value))
        # [windows * length, heads, width] -> [windows, heads, length, width]
        q, k, v = (part.view(len(first), length, heads, width).transpose(1, 2) for part in parts)
        attended = (
            functional.scaled_dot_product_attention(q, k, v, scale=scale)
            .transpose(1, 2)
            .reshape(-1, heads, width)
        )
        if rows is None:
            return attended
        out = out.index_copy(0, rows, attended)
    return out


def _rotate(
    states: Heads,
    cos: Float[Tensor, "patches 1 width"],
    sin: Float[Tensor, "patches 1 width"],
) -> Heads:
    half = states.shape[-1] // 2
    rotated = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return (states.float() * cos + rotated.float() * sin).to(states.dtype)
