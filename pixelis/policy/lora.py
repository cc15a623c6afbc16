"""Adapters in a model: where they sit, how the learner trains them and how an engine takes one up.

An update is W = W0 + alpha / rank * B A on linear layers of the language model (LoRA, arXiv 2106.09685), trained through peft and
merged by the engines. Layers may have ranks of their own (`policy.lora.ranks`), with one alpha / rank for all. With `policy.full`
the same record carries whole parameters instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from pixelis.errors import BadConfig, BadInput
from pixelis.policy.adapters import Adapter
from pixelis.policy.ranks import ranks_of

if TYPE_CHECKING:
    from torch import nn

    from pixelis import config

_LANGUAGE_MODEL = "language_model."


def adapted_layers(model: nn.Module, targets: list[str]) -> dict[str, nn.Linear]:
    """Linear layers that get an adapter, by name: those of the language model named in `targets`, and `lm_head` when listed.

    The vision tower never gets one, though its layers share names with the language model's. Raises BadConfig naming the choices.
    """
    layers: dict[str, nn.Linear] = {}
    choices: set[str] = set()
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        last = name.rsplit(".", 1)[-1]
        if _LANGUAGE_MODEL in f"{name}." or name == "lm_head":
            choices.add(last)
            if last in targets:
                layers[name] = module
    missing = sorted(set(targets) - choices)
    if missing:
        near = difflib.get_close_matches(missing[0], choices, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadConfig(
            f"policy.lora.targets: the model has no layer {missing[0]!r}", fix=f"{hint}choose from {', '.join(sorted(choices))}"
        )
    return layers


def add_lora(model: nn.Module, lora: config.LoraConfig, seed: int = 0) -> nn.Module:
    """Put trainable adapters into the model, in place, and freeze everything else; returns the model.

    A is drawn from `seed`, B is zero: the policy is unchanged at first. Raises BadConfig for unknown targets, and what
    `ranks.ranks_of` raises.
    """
    from peft import LoraConfig, inject_adapter_in_model

    from pixelis.policy.lora_linear import LoraLinear

    ranks = ranks_of(lora, adapted_layers(model, lora.targets))
    own = {re.escape(name): rank for name, rank in ranks.items() if rank != lora.rank}
    model.requires_grad_(False)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        rank_pattern=own,
        alpha_pattern={name: rank * lora.alpha / lora.rank for name, rank in own.items()},
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
    """The adapters' parameters under their published names (`{module}.A`, `{module}.B`)."""
    result = {}
    for name, parameter in model.named_parameters():
        for part in ("A", "B"):
            marker = f".lora_{part}.default.weight"
            if name.endswith(marker):
                result[f"{name.removesuffix(marker)}.{part}"] = parameter
    return result


class BaseWeights(dict[str, torch.Tensor]):
    """Name of a parameter -> its value in the base model; filled when a parameter is first overwritten."""


def merge_into(model: nn.Module, base: BaseWeights, adapter: Adapter | None) -> None:
    """Make a plain model (without peft layers) compute what the base with this adapter computes; None restores the base.

    Always computed from the base weights kept in `base`, so any number of loads leaves no rounding behind. Raises BadInput for an
    adapter that does not fit or is not finite; then nothing was changed.
    """
    parameters = dict(model.named_parameters())
    updates = weight_updates(parameters, adapter) if adapter is not None else {}
    with torch.no_grad():
        for name in set(base) - set(updates):
            parameters[name].copy_(base[name])
        for name, (left, right) in updates.items():
            weight = parameters[name]
            original = base.setdefault(name, weight.detach().clone())
            if right is None:
                weight.copy_(left.to(weight.device))
                continue
            # Multiplied in float32 whatever the model's type, and rounded once.
            product = left.to(weight.device) @ right.to(weight.device)
            weight.copy_(original.float() + product if original.dtype != torch.float32 else original + product)


def weight_updates(
    parameters: Mapping[str, torch.Tensor], adapter: Adapter
) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Name of each parameter that the adapter changes -> (B scaled, A) to add to it, or (new value, None).

    parameters: those of the base model; only their shapes are read. Raises BadInput for an adapter that does not fit or is not
    finite.
    """
    updates: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    if adapter.kind == "full":
        for name, array in adapter.tensors.items():
            if name not in parameters:
                raise BadInput(f"the model has no parameter {name}", code="foreign_adapter")
            _check(name, array, tuple(parameters[name].shape))
            updates[name] = (torch.from_numpy(np.array(array)), None)
        return updates
    modules = {name[:-2] for name in adapter.tensors}
    _check_names(set(adapter.tensors), {f"{m}.{part}" for m in modules for part in "AB"})
    for module in sorted(modules):
        weight = parameters.get(f"{module}.weight")
        if weight is None:
            raise BadInput(f"the model has no layer {module}", code="foreign_adapter")
        right, left = adapter.tensors[f"{module}.A"], adapter.tensors[f"{module}.B"]
        _check(f"{module}.A", right, (right.shape[0], weight.shape[1]))
        _check(f"{module}.B", left, (weight.shape[0], right.shape[0]))
        updates[f"{module}.weight"] = (torch.from_numpy(np.array(left)) * adapter.scale, torch.from_numpy(np.array(right)))
    return updates


def _check_names(given: set[str], wanted: set[str]) -> None:
    if given != wanted:
        odd = sorted(given ^ wanted)[0]
        side = "lacks" if odd in wanted else "has an unexpected"
        raise BadInput(f"the adapter {side} {odd}", code="foreign_adapter", fix="use one of the same model and policy.lora")


def _check(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if tuple(array.shape) != shape:
        raise BadInput(
            f"{name} is {list(array.shape)}, the model wants {list(shape)}", code="foreign_adapter", fix="compare lora.rank"
        )
    if not np.isfinite(array).all():
        raise BadInput(f"{name} holds values that are not finite", code="non_finite_adapter")
