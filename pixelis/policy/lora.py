"""LoRA in a model, W = W0 + alpha / rank * B A (arXiv 2106.09685): for the learner, and merged for the engines."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pixelis import config
from pixelis.config.policy import ALL_LINEAR
from pixelis.errors import BadConfig, BadInput
from pixelis.policy.adapters import Adapter, is_finite, is_vision
from pixelis.policy.quantization import quantized_layers, set_product
from pixelis.policy.ranks import ranks_of

if TYPE_CHECKING:
    from torch import nn

_LORA_NAME = re.compile(r"(.+)\.lora_([AB])\.default\.weight")


def adapted_layers(model: nn.Module, targets: list[str], vision_tower: bool = False) -> dict[str, nn.Linear]:
    """Linear layers that get an adapter: those named in `targets`, and with `vision_tower` all of the tower."""
    layers: dict[str, nn.Linear] = {}
    choices, lora = set[str](), config.LoraConfig(targets=targets)
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        last = name.rsplit(".", 1)[-1]
        if not is_vision(name):
            choices.add(last)
            if lora.adapts(last):
                layers[name] = module
        elif vision_tower:
            layers[name] = module
    if vision_tower and not any(map(is_vision, layers)):
        raise BadConfig("the model has no vision tower to adapt", fix="set policy.lora.vision_tower=false")
    if "lm_head" in layers and "lm_head.weight" not in dict(model.named_parameters()):
        # Merging would change the embedding too, which the adapter was not trained for.
        message = "policy.lora.targets: the model's lm_head is tied to its embedding"
        raise BadConfig(message, fix="remove lm_head from policy.lora.targets")
    if missing := sorted(set(targets) - choices - {ALL_LINEAR}):
        matches = difflib.get_close_matches(missing[0], choices, n=1)
        hint = f"did you mean {matches[0]}? " if matches else ""
        message = f"policy.lora.targets: the model has no layer {missing[0]!r}"
        raise BadConfig(message, fix=f"{hint}choose from {', '.join(sorted(choices))}")
    return layers


def add_lora(model: nn.Module, lora: config.LoraConfig, seed: int = 0) -> nn.Module:
    """Add trainable adapters in place and freeze all other parameters. B is zero at first."""
    from peft import LoraConfig, inject_adapter_in_model

    from pixelis.policy.lora_linear import LoraLinear

    ranks = ranks_of(lora, adapted_layers(model, lora.targets, lora.vision_tower))
    other_ranks = {re.escape(name): rank for name, rank in ranks.items() if rank != lora.rank}
    model.requires_grad_(False)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        rank_pattern=other_ranks,
        alpha_pattern={name: rank * lora.alpha / lora.rank for name, rank in other_ranks.items()},
        target_modules="|".join(re.escape(n) for n in ranks),
        bias="none",
    )
    settings._register_custom_module({torch.nn.Linear: LoraLinear})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        is_adapter = ".lora_A." in name or ".lora_B." in name
        parameter.requires_grad_(is_adapter)
        if is_adapter:
            parameter.data = parameter.data.float()
    return model


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters by their names in an `Adapter` (`{module}.A`, `{module}.B`)."""
    found = ((_LORA_NAME.fullmatch(name), parameter) for name, parameter in model.named_parameters())
    return {f"{match[1]}.{match[2]}": parameter for match, parameter in found if match}


BaseWeights = dict[str, Tensor]
"""Name of a parameter -> value in the base model, added when `merge_into` first overwrites it."""


def merge_into(model: nn.Module, base: BaseWeights, adapter: Adapter | None) -> None:
    """Set the weights of a model to base plus adapter; None restores the base.

    `base` keeps the originals, so that rounding errors do not add up. 4-bit layers apply their product beside
    the weight. BadInput, and no change, for an adapter that does not fit.
    """
    parameters = dict(model.named_parameters())
    quantized = {f"{name}.weight": layer for name, layer in quantized_layers(model).items()}
    if adapter is not None and adapter.kind == "full" and quantized:
        message = "a model of all parameters cannot be loaded into a 4-bit base"
        raise BadInput(message, code="foreign_adapter", fix="set policy.quantization=none")
    packed = {
        name: torch.empty(layer.out_features, layer.in_features, device="meta")
        for name, layer in quantized.items()
    }
    updates = weight_updates({**parameters, **packed}, adapter) if adapter is not None else {}
    for name, layer in quantized.items():
        set_product(layer, updates.pop(name, None))
    with torch.no_grad():
        for name in set(base) - set(updates):
            parameters[name].copy_(base[name])
        for name, (left, right) in updates.items():
            weight = parameters[name]
            original = base.setdefault(name, weight.detach().clone())
            if right is None:
                weight.copy_(left.to(weight.device))
                continue
            # The sum is computed in float32 for any type of the model and rounded once.
            weight.copy_(original.float() + left.to(weight.device) @ right.to(weight.device))


def weight_updates(
    parameters: Mapping[str, Tensor], adapter: Adapter
) -> dict[str, tuple[Float[Tensor, "out rank"], Float[Tensor, "rank in"] | None]]:
    """Changed parameter -> (scaled B, A) of the product to add, or (new value, None).

    parameters: only their shapes are read. BadInput for an adapter that does not fit or is not finite.
    """
    updates: dict[str, tuple[Tensor, Tensor | None]] = {}
    if adapter.kind == "full":
        for name, array in adapter.tensors.items():
            if name not in parameters:
                raise BadInput(f"the model has no parameter {name}", code="foreign_adapter")
            _check(name, array, tuple(parameters[name].shape))
            with warnings.catch_warnings():  # the tensor shares the array's memory; nothing writes to it
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                tensor = torch.from_numpy(array)
            updates[name] = (tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor, None)
        return updates
    modules = {name[:-2] for name in adapter.tensors}
    if differing := sorted(set(adapter.tensors) ^ {f"{m}.{part}" for m in modules for part in "AB"}):
        problem = "has an unexpected" if differing[0] in adapter.tensors else "lacks"
        fix = "use an adapter of the same model and policy.lora"
        raise BadInput(f"the adapter {problem} {differing[0]}", code="foreign_adapter", fix=fix)
    for module in sorted(modules):
        weight = parameters.get(f"{module}.weight")
        if weight is None:
            raise BadInput(f"the model has no layer {module}", code="foreign_adapter")
        right, left = adapter.tensors[f"{module}.A"], adapter.tensors[f"{module}.B"]
        _check(f"{module}.A", right, (right.shape[0], weight.shape[1]))
        _check(f"{module}.B", left, (weight.shape[0], right.shape[0]))
        scaled = torch.from_numpy(np.array(left)) * adapter.scale
        updates[f"{module}.weight"] = (scaled, torch.from_numpy(np.array(right)))
    return updates


def _check(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if tuple(array.shape) != shape:
        message = f"{name} has the shape {list(array.shape)}, the model needs {list(shape)}"
        raise BadInput(message, code="foreign_adapter", fix="compare policy.lora.rank")
    if not is_finite(array):
        raise BadInput(f"{name} holds values that are not finite", code="non_finite_adapter")
