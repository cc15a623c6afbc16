"""A model's architecture on torch's meta device: shapes without weights, and bytes that a layer saves for its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pixelis.policy.lora import adapted_layers, add_lora
from pixelis.policy.model import model_class
from pixelis.policy.model_path import resolve
from pixelis.policy.ranks import largest_rank, ranks_of
from pixelis.policy.transformers_compat import AttentionInterface

if TYPE_CHECKING:
    from pixelis import config

MEASURED_TOKENS = 256
"""Input length of a measured layer. Saved bytes are linear in it, because fused attention does not save a square matrix."""
_MEASURED = "pixelis_measured"


class Architecture:
    """Architecture of a model folder. Raises MissingFile without config.json, BadConfig for an unsupported model family."""

    def __init__(self, name: str, dtype: torch.dtype = torch.bfloat16):
        self.folder = resolve(name)
        self._class, self.dtype = model_class(self.folder), dtype
        self.config = self._class.config_class.from_pretrained(self.folder, local_files_only=True)
        self.family: str = self.config.model_type
        self.model = self.fresh()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.text, self.vision = self.config.get_text_config(), getattr(self.config, "vision_config", None)

    def fresh(self) -> Any:
        """A new copy of the model that the caller may modify."""
        with torch.device("meta"):
            return self._class._from_config(self.config, dtype=self.dtype)

    def single_layer(self, lora: config.LoraConfig | None = None) -> Any:
        """A copy with one decoder layer and one vision block; with `lora`, adapters of its largest rank."""
        model = self.fresh()
        inner, visual = model.model.language_model, model.model.visual
        inner.layers = inner.layers[:1]
        if self.vision is not None:
            visual.blocks = visual.blocks[:1]
        if lora is not None:
            uniform = lora.model_copy(update={"ranks": None, "rank": largest_rank(lora)})
            with torch.device("meta"):
                add_lora(model, uniform)
        return model

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return self.dtype.itemsize

    @property
    def multiple(self) -> int:
        """Side in pixels of the square tile that is one image token. Sides of a view are multiples of it. 28 without vision."""
        if self.vision is None:
            return 28
        return int(self.vision.patch_size) * int(self.vision.spatial_merge_size)

    @property
    def positions(self) -> int:
        """Longest sequence that the model supports."""
        return int(self.text.max_position_embeddings)

    @property
    def kv_token_bytes(self) -> int:
        """KV cache bytes of a token: 2 * layers * kv heads * head width * bytes (GQA, arXiv 2305.13245)."""
        head = getattr(self.text, "head_dim", None) or self.text.hidden_size // self.text.num_attention_heads
        return 2 * self.text.num_hidden_layers * self.text.num_key_value_heads * head * self.width

    def shapes(self, targets: list[str], vision_tower: bool = False) -> dict[str, tuple[int, int]]:
        """(out, in) of each layer that gets an adapter. Raises the errors of `lora.adapted_layers`."""
        layers = adapted_layers(self.model, targets, vision_tower)
        return {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}

    def ranks(self, lora: config.LoraConfig) -> dict[str, int]:
        """Rank of each layer that gets an adapter. Raises the errors of `ranks.ranks_of`."""
        return ranks_of(lora, self.shapes(lora.targets, lora.vision_tower))

    def trained_parameters(self, policy: config.PolicyConfig) -> int:
        """Parameters that full-parameter training changes."""
        return self.parameters - (self.vision_parameters if policy.freeze_vision_tower else 0)

    @property
    def vision_parameters(self) -> int:
        """Parameters of the vision tower."""
        return sum(p.numel() for p in self.model.model.visual.parameters())


class _FlashAttention(torch.autograd.Function):
    """Saves the tensors of a fused attention: queries, keys, values, output, row sums (arXiv 2205.14135, section 3.1)."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = query.new_empty(query.shape)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError("measured layers run forward only")


def _attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, None]:
    return _FlashAttention.apply(query, key, value).transpose(1, 2), None


AttentionInterface.register(_MEASURED, _attention)


def saved_bytes(module: torch.nn.Module, run: Callable[[], Any]) -> int:
    """Bytes of the distinct tensors that `run` saves for a backward pass, without the parameters of `module`."""
    parameters = {p.untyped_storage()._cdata for p in module.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # references keep the addresses distinct

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in saved.values())


def language_layer_bytes(model: Any, tokens: int) -> int:
    """Bytes that a decoder layer with its adapters saves for its backward pass over `tokens` tokens."""
    inner = model.model.language_model
    inner.config._attn_implementation = _MEASURED
    layer, dtype, widths = inner.layers[0].train(), model.dtype, 1
    if hasattr(layer.mlp, "experts") and dtype == torch.float32:
        # On the meta device torch multiplies experts in bfloat16 alone.
        layer, dtype, widths = layer.to(torch.bfloat16), torch.bfloat16, 2
    hidden = torch.empty(1, MEASURED_TOKENS, inner.config.hidden_size, device="meta", dtype=dtype, requires_grad=True)
    axes = (3,) if hasattr(model.config, "vision_config") else ()
    positions = torch.empty(*axes, 1, MEASURED_TOKENS, device="meta", dtype=torch.int64)
    rotary = inner.rotary_emb(hidden, positions)
    measured = saved_bytes(layer, lambda: layer(hidden, position_embeddings=rotary, attention_mask=None))
    return widths * measured * tokens // MEASURED_TOKENS


def vision_width(vision: Any) -> int:
    """Width of the blocks of a vision tower; in Qwen2-VL `hidden_size` is that of its output."""
    return int(getattr(vision, "embed_dim", vision.hidden_size))


def vision_block_bytes(model: Any, patches: int) -> int:
    """Bytes that a block of the vision tower saves for its backward pass over `patches` patches."""
    visual = model.model.visual
    visual.config._attn_implementation = _MEASURED
    block, settings = visual.blocks[0].train(), visual.config
    width = vision_width(settings)
    hidden = torch.empty(MEASURED_TOKENS, width, device="meta", dtype=model.dtype, requires_grad=True)
    table = torch.empty(MEASURED_TOKENS, width // settings.num_heads, device="meta")
    bounds = torch.tensor([0, MEASURED_TOKENS], dtype=torch.int32)  # the block reads the values, so not on the meta device
    measured = saved_bytes(block, lambda: block(hidden, cu_seqlens=bounds, position_embeddings=(table, table)))
    return measured * patches // MEASURED_TOKENS


def learner_dtype(policy: config.PolicyConfig, gpu: bool) -> torch.dtype:
    """Expected type of the weights. `model.pick_dtype` chooses it when the model is loaded."""
    if policy.dtype == "auto":
        return torch.bfloat16 if gpu else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[policy.dtype]
