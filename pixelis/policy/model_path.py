"""A model's folder: where it is, of which family, and the fingerprint by which adapters know it. Loads no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pixelis.errors import MissingFile

NANO = Path(__file__).resolve().parents[1] / "nano" / "base"
_WHOLE = 64 * 2**20
_BLOCK = 2**16


def resolve(name: str) -> Path:
    """The folder of a model: `nano` is the embedded one, anything else a path. Raises MissingFile without a config.json there."""
    folder = NANO if name == "nano" else Path(name).expanduser()
    if not (folder / "config.json").is_file():
        if name == "nano":
            raise MissingFile("the embedded model is not there", fix="python scripts/pretrain_nano.py makes it")
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
