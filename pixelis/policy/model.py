"""Loading a vision-language model: any Hugging Face folder of Qwen2.5-VL or Qwen3-VL, or the embedded nano."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pixelis.dialogue.spec import ModelSpec, load_tokenizer
from pixelis.errors import BadConfig, BadInput, MissingDependency, MissingFile
from pixelis.policy.vision import batch_equal_windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pixelis import config

NANO = Path(__file__).resolve().parents[1] / "nano" / "base"
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
_WHOLE = 64 * 2**20
_BLOCK = 2**16


def resolve(name: str) -> Path:
    """The folder of a model: `nano` is the embedded one, anything else a path. Raises MissingFile without a config.json there."""
    folder = NANO if name == "nano" else Path(name).expanduser()
    if not (folder / "config.json").is_file():
        if name == "nano":
            raise MissingFile("the embedded model is not there", fix="python -m pixelis.jobs.pretrain_nano makes it")
        raise MissingFile(f"no model in {folder}", fix="set policy.model to `nano` or to a folder with config.json")
    return folder


def fingerprint(folder: str | Path) -> str:
    """Hash of a model's configuration and weights, to tell whose adapter an adapter is.

    Files up to 64 MiB are read whole; of larger ones the size, the first block (the header) and 64 blocks spread evenly.
    """
    digest = hashlib.sha256()
    folder = Path(folder)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with open(path, "rb") as file:
            if size <= _WHOLE:
                digest.update(file.read())
                continue
            for i in range(65):
                file.seek(i * (size - _BLOCK) // 64)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


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


def load_model(
    policy: config.Policy, device: torch.device | str | None = None, folder: str | Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ModelSpec]:
    """(model in eval mode on `device`, tokenizer, spec) of `folder` or `policy.model`, with the vision tower's attention batched.

    Raises MissingFile for no such folder, BadConfig for another architecture, BadInput for weights that do not fit.
    """
    import transformers
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration

    folder = resolve(str(folder) if folder is not None else policy.model)
    place = torch.device(device) if device is not None else default_device()
    family = AutoConfig.from_pretrained(folder).model_type
    if family not in FAMILIES:
        raise BadConfig(f"policy.model: {folder.name} is a {family}", fix="use a Qwen2.5-VL or Qwen3-VL folder")
    transformers.utils.logging.disable_progress_bar()  # progress belongs to the driver
    kind: Any = Qwen3VLForConditionalGeneration if family == "qwen3_vl" else Qwen2_5_VLForConditionalGeneration
    model, report = kind.from_pretrained(
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
