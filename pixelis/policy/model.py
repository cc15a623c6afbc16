"""Loading a vision-language model: any Hugging Face folder of Qwen2.5-VL or Qwen3-VL, or the embedded nano."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pixelis.dialogue.spec import ModelSpec, load_tokenizer, model_config
from pixelis.errors import BadInput, MissingDependency
from pixelis.policy.model_path import resolve
from pixelis.policy.transformers_compat import Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration
from pixelis.policy.vision import batch_equal_windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pixelis import config


def default_device() -> torch.device:
    """The accelerator of this process if there is one, else the CPU.

    Ray Train shows a worker all GPUs of its node and tells it its own by LOCAL_RANK, the one that DeepSpeed takes too.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    device = torch.device("cuda", index if index < torch.cuda.device_count() else torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of the weights: `auto` is bfloat16 on GPUs that have it, else float32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def pick_attention(name: str, device: torch.device) -> str:
    """`auto` is flash attention when the package is there and the device is a GPU, else sdpa. Raises MissingDependency."""
    installed = importlib.util.find_spec("flash_attn") is not None
    if name == "auto":
        return "flash_attention_2" if device.type == "cuda" and installed else "sdpa"
    if name == "flash_attention_2" and not installed:
        raise MissingDependency("policy.attention wants flash-attn, which is not installed", fix="pip install pixelis[flash]")
    return name


def model_class(folder: Path) -> Any:
    """The class of transformers that a model folder is of. Raises BadConfig for another architecture than the two families."""
    family = model_config(folder)["model_type"]
    return Qwen3VLForConditionalGeneration if family == "qwen3_vl" else Qwen2_5_VLForConditionalGeneration


def load_model(
    policy: config.PolicyConfig, device: torch.device | str | None = None, folder: str | Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ModelSpec]:
    """(model in eval mode on `device`, tokenizer, spec) of `folder` or `policy.model`, with the vision tower's attention batched.

    Raises MissingFile for no such folder, BadConfig for another architecture, BadInput for weights that do not fit.
    """
    from transformers.utils import logging

    folder = resolve(str(folder) if folder is not None else policy.model)
    place = torch.device(device) if device is not None else default_device()
    logging.disable_progress_bar()  # progress belongs to the driver
    model, report = model_class(folder).from_pretrained(
        folder,
        dtype=pick_dtype(policy.dtype, place),
        attn_implementation=pick_attention(policy.attention, place),
        output_loading_info=True,
    )
    if report["missing_keys"] or report["mismatched_keys"]:
        lost = sorted(str(k) for k in (*report["missing_keys"], *report["mismatched_keys"]))
        raise BadInput(f"{folder.name}: {len(lost)} weights are missing or misshapen, first {lost[0]}", code="bad_model")
    model.to(place).eval()
    batch_equal_windows(model)
    tokenizer = load_tokenizer(folder)
    return model, tokenizer, ModelSpec.load(folder, tokenizer)
