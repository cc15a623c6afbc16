"""Loads a vision-language model: a Hugging Face folder of a supported family, or the embedded nano."""

from __future__ import annotations

import importlib.util
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from pixelis.errors import BadInput, MissingDependency
from pixelis.families.family import ModelSpec
from pixelis.families.spec import load_spec, load_tokenizer, model_family
from pixelis.policy import quantization
from pixelis.policy.model_path import resolve

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pixelis import config


def default_device() -> torch.device:
    """This process's GPU (of a Ray Train worker LOCAL_RANK's), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    device = torch.device("cuda", index if index < torch.cuda.device_count() else torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on GPUs that support it, else float32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_model(
    policy: config.PolicyConfig,
    device: torch.device | str | None = None,
    folder: str | Path | None = None,
    zero3: Mapping[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ModelSpec]:
    """(model in eval mode on `device`, tokenizer, spec) of `folder`, by default of `policy.model`.

    zero3: DeepSpeed's configuration, to divide the weights while reading.
    """
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.utils import logging

    if policy.attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        fix = "pip install --no-build-isolation 'flash-attn>=2.8' (compiles with nvcc), or leave the key out"
        raise MissingDependency("policy.attention needs flash-attn, which is not installed", fix=fix)
    folder = resolve(str(folder) if folder is not None else policy.model)
    target = torch.device(device) if device is not None else default_device()
    logging.disable_progress_bar()  # the driver shows progress
    dtype = pick_dtype(policy.dtype, target)
    # transformers divides the weights while this object lives. Their type may differ from that of the trained
    # adapters.
    division = (
        HfDeepSpeedConfig({**zero3, "bf16": {"enabled": dtype == torch.bfloat16}})
        if zero3 is not None
        else None
    )
    family = model_family(folder, policy.family)
    model, report = family.model_class().from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=policy.attention,
        output_loading_info=True,
        key_mapping=dict(family.key_mapping),
        **quantization.loading_options(policy, dtype, target),
    )
    del division
    for module in model.modules():
        # Of some models one for each type of layer
        frequencies = [
            b for name, b in module._buffers.items() if name.endswith("inv_freq") and b is not None
        ]
        if any(values.dtype != torch.float32 for values in frequencies):
            # DeepSpeed rounded the rotary frequencies to bfloat16 while it divided the model.
            type(module).__init__(module, module.config)
            module.to(frequencies[0].device)
    if names := sorted(str(k) for k in (*report["missing_keys"], *report["mismatched_keys"])):
        message = f"{folder}: {len(names)} weights are missing or have the wrong shape, first {names[0]}"
        raise BadInput(message, code="bad_model", fix="download the model again, or correct its config.json")
    model.to(target).eval()
    family.prepare(model)
    for layer in quantization.quantized_layers(model).values():
        # Else inference on some CPUs repacks the weights, and rounds their scales to bfloat16.
        layer.support_avx512bf16_for_cpu = False
    if target.type == "cuda":
        fuse_norms(model)
        # In the convolution that embeds patches TF32 would make a float32 policy's log-probabilities differ
        # between learner and engine.
        torch.backends.cudnn.allow_tf32 = False
    tokenizer = load_tokenizer(folder)
    return model, tokenizer, load_spec(folder, tokenizer, policy.family)


def fuse_norms(model: nn.Module) -> None:
    """Use torch's GPU kernel for RMSNorm; transformers' makes several passes over the activations.

    Classes with other formulas, as weights around 0, name their epsilon otherwise.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = types.MethodType(_rms_norm, module)


def _rms_norm(self: Any, hidden_states: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
    return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
