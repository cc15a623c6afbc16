"""Folder and fingerprint of a base model. Does not import torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pixelis import hub
from pixelis.config.references import EMBEDDED
from pixelis.errors import MissingFile

_NANO = Path(__file__).resolve().parents[1] / "nano"
_FULLY_HASHED = 64 * 2**20
_BLOCK = 2**16


def resolve(name: str) -> Path:
    """Folder of a model: `nano` or `mini` for an embedded one, a path, or an id on the Hugging Face Hub.

    Raises MissingFile without config.json, and what `hub.local` raises.
    """
    folder = _NANO / EMBEDDED[name] if name in EMBEDDED else hub.local(name)
    if (folder / "config.json").is_file():
        return folder
    if name in EMBEDDED:
        fix = f"create it with `python scripts/pretrain_nano.py --model {name} --out {folder}`"
        raise MissingFile(f"the embedded model is missing from {folder}", fix=fix)
    fix = "set policy.model to `nano` or `mini`, to a folder with config.json, or to owner/name of the hub"
    raise MissingFile(f"no model in {folder}", fix=fix)


def fingerprint(folder: str | Path) -> str:
    """Hash that identifies the base model of an adapter; large files are hashed in 65 evenly spaced blocks."""
    digest = hashlib.sha256()
    folder = Path(folder)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with open(path, "rb") as file:
            if size <= _FULLY_HASHED:
                digest.update(file.read())
                continue
            for i in range(65):
                file.seek(i * (size - _BLOCK) // 64)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
