"""Gated DeltaNet layers (arXiv 2412.06464) for packed rows (learner) and for a cache of states (engine).

A layer mixes tokens by a short causal convolution and by a matrix per head, the recurrent state. What follows a
token depends on all before it only through its state: the last inputs of the convolution, and the matrices.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from pixelis.families.quick_imports import quick_imports

with quick_imports():
    # Those of flash-linear-attention and causal-conv1d where these are installed.
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        causal_conv1d_fn,
        torch_chunk_gated_delta_rule,
        torch_recurrent_gated_delta_rule,
    )

if TYPE_CHECKING:
    from torch import nn

    from pixelis.families.attention import Segments


class State(NamedTuple):
    """State of some rows after a token. inputs: the last ones of the convolution; matrices: float32."""

    inputs: Float[Tensor, "rows kernel_less_1 channels"]
    matrices: Float[Tensor, "rows heads key_width value_width"]

    def rows(self, index: Int[Tensor, " n"]) -> State:
        return State(self.inputs[index], self.matrices[index])


class Projected(NamedTuple):
    """Inputs of the convolution, log-decays and learning rates of the delta rule."""

    inputs: Float[Tensor, "rows length channels"]
    decays: Float[Tensor, "rows length heads"]
    rates: Float[Tensor, "rows length heads"]


def mix_by_segments(language_model: nn.Module) -> None:
    """Let the Gated DeltaNet layers of a model take `segments` of a packed row, or the engine's cache.

    In a packed row the state restarts at each sample; a shared prompt is computed once, and its last state
    starts the samples. With a cache, padding at the right changes no state.
    """
    for module in language_model.modules():
        if type(module).__name__.endswith("GatedDeltaNet"):
            module.forward = types.MethodType(_forward, module)


def _forward(
    self: Any,
    hidden_states: Float[Tensor, "rows length hidden"],
    cache_params: Any = None,
    segments: Segments | None = None,
    **kwargs: object,
) -> Float[Tensor, "rows length hidden"]:
    decays = -self.A_log.float().exp() * functional.softplus(
        self.in_proj_a(hidden_states).float() + self.dt_bias
    )
    projected = Projected(self.in_proj_qkv(hidden_states), decays, self.in_proj_b(hidden_states).sigmoid())
    if segments is not None:
        mixed = _mix_row(self, projected, segments)
    else:
        used, length = cache_params.used, hidden_states.shape[1]
        states, sizes = cache_params.states, cache_params.valid[:, used : used + length].sum(1)
        mixed, states[self.layer_idx] = _mix(self, projected, sizes, states.get(self.layer_idx))
    gate = self.in_proj_z(hidden_states).view(-1, self.head_v_dim)
    normed = self.norm(mixed.reshape(-1, self.head_v_dim), gate)
    return self.out_proj(normed.view(*hidden_states.shape[:2], -1))


def _mix_row(layer: Any, row: Projected, segments: Segments) -> Float[Tensor, "1 length heads value_width"]:
    """Mix each run of a packed row, those of similar length together."""
    outputs: list[Tensor] = []
    ends: list[State] = []
    for rows, sizes, prompts in segments.runs:
        batch = Projected(*(part[0].index_select(0, rows.view(-1)).view(*rows.shape, -1) for part in row))
        start = None
        if prompts is not None:
            start = State(*map(torch.cat, zip(*ends, strict=True))).rows(prompts)
        mixed, end = _mix(layer, batch, sizes, start)
        outputs.append(mixed.flatten(0, 1))
        if prompts is None:
            ends.append(end)
    return torch.cat(outputs).index_select(0, segments.run_inverse).unsqueeze(0)


def _mix(
    layer: Any, batch: Projected, sizes: Int[Tensor, " rows"], start: State | None
) -> tuple[Float[Tensor, "rows length heads value_width"], State]:
    """Outputs of rows of `sizes` tokens, padded at the right, and their states after the last one."""
    rows, length, channels = batch.inputs.shape
    kernel = layer.conv_kernel_size
    before = batch.inputs.new_zeros(rows, kernel - 1, channels) if start is None else start.inputs
    inputs = torch.cat([before, batch.inputs], 1)
    last = sizes[:, None] + torch.arange(kernel - 1, device=sizes.device)
    end = inputs.gather(1, last.unsqueeze(-1).expand(-1, -1, channels))

    convolved = causal_conv1d_fn(
        inputs.transpose(1, 2), layer.conv1d.weight.squeeze(1), layer.conv1d.bias, activation=layer.activation
    ).transpose(1, 2)[:, kernel - 1 :]
    query, key, value = convolved.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    copies = layer.num_v_heads // layer.num_k_heads
    query, key = (
        part.unflatten(-1, (-1, layer.head_k_dim)).repeat_interleave(copies, 2) for part in (query, key)
    )
    value = value.unflatten(-1, (-1, layer.head_v_dim))

    # A token without decay and learning rate leaves the state as it is.
    padding = (torch.arange(length, device=sizes.device) >= sizes[:, None]).unsqueeze(-1)
    # The recurrent kernel of flash-linear-attention has no gradient.
    is_step = length == 1 and not torch.is_grad_enabled()
    rule = torch_recurrent_gated_delta_rule if is_step else torch_chunk_gated_delta_rule
    mixed, matrices = rule(
        query,
        key,
        value,
        g=batch.decays.masked_fill(padding, 0),
        beta=batch.rates.masked_fill(padding, 0),
        initial_state=None if start is None else start.matrices,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return mixed, State(end, matrices)
