"""Loads a model of transformers for an operation, from a folder or by its id on the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pixelis import hub
from pixelis.errors import BadConfig, MissingFile

CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def load(key: str, folder: str, kinds: Mapping[str, str], fix: str) -> tuple[Any, str, dict[str, Any]]:
    """The model in evaluation mode, on the GPU if there is one, its ``model_type`` and processor settings.

    ``key``: the configuration key of the folder; ``kinds``: ``model_type`` -> class in transformers; ``fix``:
    how to get such a folder. MissingFile or BadConfig.
    """
    path = hub.local(folder)
    kind = str(read_json(path / "config.json", key, folder, fix).get("model_type"))
    if kind not in kinds:
        raise BadConfig(
            f"{key}: {folder} holds a model of type {kind!r}",
            fix="give a checkpoint of type " + ", ".join(kinds),
        )
    import torch
    import transformers

    try:
        model, info = getattr(transformers, kinds[kind]).from_pretrained(
            path, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # transformers and safetensors raise nearly anything on a damaged checkpoint
        reason = " ".join(str(error).split())[:200]
        raise BadConfig(
            f"{key}: {folder} cannot be loaded: {reason}", fix="save the model again with save_pretrained"
        ) from error
    if missing := info["missing_keys"]:
        raise BadConfig(
            f"{key}: {folder} lacks {len(missing)} weights, such as {min(missing)}",
            fix="copy the whole checkpoint: a model with random weights is useless",
        )
    processor = path / "preprocessor_config.json"
    settings = read_json(processor, key, folder, fix) if processor.is_file() else {}
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), kind, settings


def load_tokenizer(key: str, folder: str) -> Any:
    """The tokenizer in a folder. Raises BadConfig for a folder without one."""
    # transformers makes a tokenizer without words where there is none.
    path = hub.local(folder)
    if not any((path / name).is_file() for name in VOCABULARIES):
        raise BadConfig(f"{key}: {folder} has no tokenizer", fix="copy the whole checkpoint")
    import transformers

    return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)


def read_json(path: Path, key: str, folder: str, fix: str) -> dict[str, Any]:
    """A JSON object of a checkpoint. Raises MissingFile with ``fix``, or BadConfig."""
    if not path.is_file():
        raise MissingFile(f"{key}: there is no {path}", fix=fix)
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except ValueError:
        raise BadConfig(f"{key}: {path} is not JSON", fix=f"copy the checkpoint to {folder} again") from None
    return result


def normalised(picture: np.ndarray, size: tuple[int, int], settings: Mapping[str, Any]) -> Any:
    """uint8 [H, W, 3] -> float32 tensor [1, 3, *size], resized and normalised by processor settings."""
    import torch

    resample = Image.Resampling(settings.get("resample", Image.Resampling.BICUBIC))
    resized = np.asarray(Image.fromarray(picture).resize(size[::-1], resample), np.float32) / 255
    mean, std = (np.asarray(settings[name], np.float32) for name in ("image_mean", "image_std"))
    return torch.from_numpy(((resized - mean) / std).transpose(2, 0, 1)[None].copy())
