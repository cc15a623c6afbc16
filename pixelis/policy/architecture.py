"""A model's architecture on torch's meta device: shapes without weights, from its config.json alone."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch

from pixelis.families.spec import model_family
from pixelis.policy.adapters import is_vision
from pixelis.policy.flops import active_experts, attention_widths
from pixelis.policy.lora import adapted_layers
from pixelis.policy.model_path import resolve
from pixelis.policy.quantization import QUANTIZED
from pixelis.policy.ranks import ranks_of

if TYPE_CHECKING:
    from pixelis import config


class Architecture:
    """Raises MissingFile without config.json, BadConfig for an unsupported model family."""

    def __init__(self, policy: config.PolicyConfig, dtype: torch.dtype = torch.bfloat16):
        folder = resolve(policy.model)
        self.family = family = model_family(folder, policy.family)
        self.dtype, model = dtype, family.model_class()
        self.config = model.config_class.from_pretrained(folder, local_files_only=True)
        self.model_type: str = self.config.model_type
        with torch.device("meta"):
            self.model: Any = model._from_config(self.config, dtype=dtype)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.vision_parameters = sum(p.numel() for n, p in self.model.named_parameters() if is_vision(n))
        self.linear_weights = {
            name: module.weight.numel()
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear) and re.match(QUANTIZED, name)
        }
        """Number of weights of the layers that `policy.quantization` quantises"""
        self.text: Any = self.config.get_text_config()
        # Where layers differ, that of most of them
        self.text.allow_global_per_layer_attribute_access = True
        self.vision: Any = getattr(self.config, "vision_config", None)
        self.geometry = family.geometry(self.vision.to_dict() if self.vision is not None else {})
        self.queries, self.keys = attention_widths(self.model)

    @property
    def width(self) -> int:
        return self.dtype.itemsize

    def image_tokens(self, pixels: int) -> int:
        """Image tokens of a view of this area."""
        side = self.geometry.multiple
        cells = pixels // side**2
        # Views of any size are resized by the model's own processor, to which a strip is another picture
        rows = math.isqrt(cells) if side == 1 else 1
        return self.geometry.image_tokens(rows * side, cells // rows * side) if cells else 0

    @property
    def kv_token_bytes(self) -> int:
        """KV cache bytes of a token, of all layers that do not share another's keys and values.

        Layers with a sliding window count as those without, which is their size up to that length.
        """
        return 2 * self.keys * self.width

    @property
    def state_layers(self) -> int:
        """Layers with a recurrent state (Gated DeltaNet) instead of keys and values."""
        return list(getattr(self.text, "layer_types", None) or ()).count("linear_attention")

    @property
    def state_bytes(self) -> int:
        """Bytes of an episode's recurrent states: float32 matrices, and the last inputs of the convolution."""
        if not self.state_layers:
            return 0
        text = self.text
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        inputs = (text.linear_conv_kernel_dim - 1) * (2 * keys + values) * self.width
        return int(self.state_layers * (4 * values * text.linear_key_head_dim + inputs))

    @property
    def inner_width(self) -> int:
        """Width of the MLP that a token passes: with experts, of those chosen and the shared one."""
        text = self.text
        if experts := active_experts(text):
            # Gemma's dense layer stands beside the experts
            dense = (
                "intermediate_size" if hasattr(text, "top_k_experts") else "shared_expert_intermediate_size"
            )
            return int(experts * text.moe_intermediate_size + getattr(text, dense, 0))
        return int(text.intermediate_size) * (2 if getattr(text, "use_double_wide_mlp", False) else 1)

    def shapes(self, targets: list[str], vision_tower: bool = False) -> dict[str, tuple[int, int]]:
        """(out, in) of each layer that gets an adapter."""
        layers = adapted_layers(self.model, targets, vision_tower)
        return {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}

    def ranks(self, lora: config.LoraConfig) -> dict[str, int]:
        return ranks_of(lora, self.shapes(lora.targets, lora.vision_tower))

    def trained_parameters(self, policy: config.PolicyConfig) -> int:
        return self.parameters - (self.vision_parameters if policy.freeze_vision_tower else 0)

    def layer_bytes(self, tokens: int) -> list[int]:
        """Bytes that each decoder layer saves for its backward pass, by the tensors that Qwen3's, Qwen3.5's and
        Gemma 4's save of each width.

        A Gated DeltaNet layer is counted without flash-linear-attention, which needs less.
        """
        text, hidden = self.text, self.text.hidden_size
        attending = text.num_hidden_layers - self.state_layers
        queries, keys = self.queries // attending, self.keys // attending
        common = 8 * hidden + 4 * self.inner_width + 2 * active_experts(text) * hidden
        attention = 6 * queries + 5 * keys
        if (own_inputs := getattr(text, "hidden_size_per_layer_input", None)) is not None:
            # Gemma has more norms, all in float32, two of them for experts and one for a layer's own inputs
            common += (10 + 5 * bool(own_inputs) + 16 * bool(active_experts(text))) * hidden + 4 * own_inputs
            attention += queries + 3 * keys
        if not self.state_layers:
            return [tokens * (common + attention) * self.width] * text.num_hidden_layers
        # Norms compute in float32, and attention has a gate as wide as the queries.
        common, attention = common + 2 * hidden, attention + 3 * queries + keys
        heads = text.linear_num_value_heads
        mixing = 35 * heads * text.linear_value_head_dim + 640 * heads
        mixing += 4 * text.linear_num_key_heads * text.linear_key_head_dim
        widths = {"full_attention": common + attention, "linear_attention": common + mixing}
        return [tokens * widths[kind] * self.width for kind in text.layer_types]

    def vision_block_bytes(self, patches: int) -> int:
        """Bytes that a block of the vision tower saves for its backward pass."""
        vision, width = self.vision, self.vision_width
        inner = getattr(vision, "intermediate_size", None) or width * vision.mlp_ratio
        is_gated = any("gate_proj" in name for name, _ in self.model.named_modules() if is_vision(name))
        return int(patches * ((16 if is_gated else 12) * width + (4 if is_gated else 2) * inner) * self.width)

    @property
    def vision_width(self) -> int:
        """Width of the blocks of the vision tower; in Qwen2-VL `hidden_size` is that of its output."""
        return int(getattr(self.vision, "embed_dim", self.vision.hidden_size))


def learner_dtype(policy: config.PolicyConfig, gpu: bool) -> torch.dtype:
    if policy.dtype == "auto":
        return torch.bfloat16 if gpu else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[policy.dtype]
