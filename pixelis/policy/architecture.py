"""A model's architecture on torch's meta device: shapes without weights, and what a layer saves for its backward pass."""

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
"""Tokens that the measured layer reads. What it saves grows in proportion: attention saves no square."""
_MEASURED = "pixelis_measured"


class Architecture:
    """A model folder's architecture on the meta device. Raises MissingFile without config.json, BadConfig for another family."""

    def __init__(self, name: str, dtype: torch.dtype = torch.bfloat16):
        self.folder = resolve(name)
        kind = model_class(self.folder)
        self.config = kind.config_class.from_pretrained(self.folder, local_files_only=True)
        self.family: str = self.config.model_type
        self._build = lambda: kind._from_config(self.config, dtype=dtype)
        self.dtype = dtype
        self.model = self.fresh()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.text, self.vision = self.config.get_text_config(), self.config.vision_config

    def fresh(self) -> Any:
        """Another copy of the model, to be changed."""
        with torch.device("meta"):
            return self._build()

    def thin(self, lora: config.LoraConfig | None = None) -> Any:
        """A copy with a single layer and a single vision block, with adapters where asked for (all of the largest rank)."""
        model = self.fresh()
        inner, visual = model.model.language_model, model.model.visual
        inner.layers, visual.blocks = inner.layers[:1], visual.blocks[:1]
        if lora is not None:
            uniform = lora.model_copy(update={"ranks": None, "rank": largest_rank(lora)})
            with torch.device("meta"):
                add_lora(model, uniform)
        return model

    @property
    def width(self) -> int:
        """Bytes of one number of the weights."""
        return self.dtype.itemsize

    @property
    def multiple(self) -> int:
        """Sides of a view are multiples of this many pixels; such a tile is one image token."""
        return int(self.vision.patch_size) * int(self.vision.spatial_merge_size)

    @property
    def positions(self) -> int:
        """Longest sequence that the model was made for."""
        return int(self.text.max_position_embeddings)

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token: 2 * layers * kv heads * head width * bytes (GQA, arXiv 2305.13245)."""
        head = getattr(self.text, "head_dim", None) or self.text.hidden_size // self.text.num_attention_heads
        return 2 * self.text.num_hidden_layers * self.text.num_key_value_heads * head * self.width

    def shapes(self, targets: list[str]) -> dict[str, tuple[int, int]]:
        """(out, in) of each layer that gets an adapter. Raises BadConfig for a target that the model does not have."""
        return {name: (m.out_features, m.in_features) for name, m in adapted_layers(self.model, targets).items()}

    def ranks(self, lora: config.LoraConfig) -> dict[str, int]:
        """Rank of each layer that gets an adapter. Raises what `ranks.ranks_of` raises."""
        return ranks_of(lora, self.shapes(lora.targets))

    @property
    def counts(self) -> tuple[int, int]:
        """Parameters of the whole and of the vision tower."""
        return self.parameters, sum(p.numel() for p in self.model.model.visual.parameters())


class _Flash(torch.autograd.Function):
    """Saves what a fused attention does: queries, keys, values, output and one number a query (arXiv 2205.14135, section 3.1)."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = query.new_empty(query.shape)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError("measured layers run forward only")


def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, None]:
    return _Flash.apply(query, key, value).transpose(1, 2), None


AttentionInterface.register(_MEASURED, _attend)


def saved_bytes(module: torch.nn.Module, run: Callable[[], Any]) -> int:
    """Bytes of the distinct tensors that ``run`` keeps for a backward pass, without the parameters of ``module``."""
    own = {p.untyped_storage()._cdata for p in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # holding them keeps their identities distinct

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(storage.nbytes() for storage in kept.values())


def language_layer_bytes(model: Any, tokens: int) -> int:
    """What one decoder layer saves for its backward pass over ``tokens`` tokens, with its adapters when it has any."""
    inner = model.model.language_model
    inner.config._attn_implementation = _MEASURED
    hidden = torch.empty(1, MEASURED_TOKENS, inner.config.hidden_size, device="meta", dtype=model.dtype, requires_grad=True)
    positions = torch.empty(3, 1, MEASURED_TOKENS, device="meta", dtype=torch.int64)
    rotary = inner.rotary_emb(hidden, positions)
    layer = inner.layers[0].train()
    found = saved_bytes(layer, lambda: layer(hidden, position_embeddings=rotary, attention_mask=None))
    return found * tokens // MEASURED_TOKENS


def vision_block_bytes(model: Any, patches: int) -> int:
    """What one block of the vision tower saves for its backward pass over ``patches`` patches."""
    visual = model.model.visual
    visual.config._attn_implementation = _MEASURED
    block, settings = visual.blocks[0].train(), visual.config
    hidden = torch.empty(MEASURED_TOKENS, settings.hidden_size, device="meta", dtype=model.dtype, requires_grad=True)
    table = torch.empty(MEASURED_TOKENS, settings.hidden_size // settings.num_heads, device="meta")
    bounds = torch.tensor([0, MEASURED_TOKENS], dtype=torch.int32)  # read as numbers, so not on the meta device
    found = saved_bytes(block, lambda: block(hidden, cu_seqlens=bounds, position_embeddings=(table, table)))
    return found * patches // MEASURED_TOKENS
