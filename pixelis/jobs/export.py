"""Export a policy for other programs: a PEFT adapter, or with --merge a Hugging Face model folder.

usage: pixelis export CHECKPOINT OUT [--merge] [--model FOLDER] [--dtype bfloat16|float16|float32] [--dry-run]

CHECKPOINT is a checkpoint, or a run: then its best one, or without evaluations the last. transformers with PEFT, and vLLM with
--enable-lora, load the adapter beside the base model; they load the merged folder like any other model. Policies of
policy.full=true can only be merged.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from pixelis.errors import BadInput, InfraFailure, MissingFile, PixelisError
from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_adapter
from pixelis.policy.model_path import fingerprint, resolve

DTYPES = ("bfloat16", "float16", "float32")


def find_checkpoint(path: Path) -> Path:
    """The checkpoint folder itself, or the best or else the last one of a run. Raises MissingFile."""
    is_run = (path / "checkpoints").is_dir()
    best = (path / "best").resolve() if is_run else path
    found = best if best.is_dir() else checkpoint.latest(path)
    if found is None or not found.is_dir():
        raise MissingFile(f"no checkpoint in {path}", fix="name a run, or a folder like RUN/checkpoints/step_00000010")
    return found


def base_model(folder: Path, name: str | None, sha256: str) -> Path:
    """Folder of the base model: `name`, or that of the run's configuration. Raises BadInput if it is another model."""
    if name is None:
        config = folder.parent.parent / "config.yaml"
        if not config.is_file():
            raise MissingFile(f"{config} is missing, so the base model is unknown", fix="name it with --model FOLDER")
        name = str(yaml.safe_load(config.read_text(encoding="utf-8"))["policy"]["model"])
    model = resolve(name)
    if sha256 and fingerprint(model) != sha256:
        message = f"{folder} belongs to another base model than {name}"
        raise BadInput(message, code="foreign_adapter", fix="name its model with --model")
    return model


def export(
    source: Path, out: Path, *, merge: bool, model: str | None = None, dtype: str | None = None, dry_run: bool = False
) -> str:
    """Write the export and return a description. Raises BadInput if `out` exists, InfraFailure if the disk is too small."""
    folder = find_checkpoint(source)
    policy = load_adapter(folder, lazily=True)
    base = base_model(folder, model, policy.base_sha256)
    if policy.kind == "full" and not merge:
        raise BadInput(f"{folder} holds all parameters, which are no adapter", fix="add --merge")
    weights = sorted(base.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in weights) if merge else policy.nbytes
    if merge and dtype == "float32":
        size *= 2

    def write(aside: Path) -> None:
        from pixelis.dialogue.spec import TEXT_FAMILIES, model_config
        from pixelis.policy import export as formats

        if merge:
            import torch

            formats.write_merged_model(policy, base, aside, getattr(torch, dtype) if dtype else None)
        else:
            text_only = model_config(base)["model_type"] in TEXT_FAMILIES
            formats.write_peft(policy, aside, str(base), text_only=text_only)

    kind = "merged model" if merge else "PEFT adapter"
    return _write(f"{kind} of {folder} on {base}, {size / 1e9:.3f} GB", out, size, write, dry_run)


def _write(text: str, out: Path, size: int, write: Callable[[Path], object], dry_run: bool) -> str:
    """Write a new folder beside `out` and rename it, with at most ``size`` bytes."""
    if out.exists():
        raise BadInput(f"{out} exists", fix="name a new folder, or remove this one")
    parent = next(p for p in out.absolute().parents if p.is_dir())
    free = shutil.disk_usage(parent).free
    if free < size:
        message = f"{out} needs {size / 1e9:.1f} GB, {parent} has {free / 1e9:.1f} GB"
        raise InfraFailure(message, code="disk_full", fix="choose another disk")
    if dry_run:
        return f"{text}: would be written to {out}"
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        write(aside)
        for file in aside.iterdir():  # a crash after the rename must not leave empty files under the final name
            with file.open("rb") as content:
                os.fsync(content.fileno())
        aside.rename(out)
    except OSError as error:
        raise InfraFailure(
            f"{out} could not be written: {error}", code="disk_full", fix="free the disk, or choose another"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return f"{text}: written to {out}"


def main() -> None:
    """Entry point of `pixelis export`."""
    description, _, usage = (__doc__ or "").partition("\n\nusage:")
    parser = argparse.ArgumentParser("pixelis export", description=description, epilog=usage.partition("\n\n")[2])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--merge", action="store_true", help="write a whole model instead of an adapter")
    parser.add_argument("--model", help="base model; default: policy.model of the run")
    parser.add_argument("--dtype", choices=DTYPES, help="type of a merged model's weights; default: as in the base model")
    parser.add_argument("--dry-run", action="store_true", help="check everything and write nothing")
    a = parser.parse_args()
    try:
        print(export(a.checkpoint, a.out, merge=a.merge, model=a.model, dtype=a.dtype, dry_run=a.dry_run))
    except PixelisError as error:
        print(f"pixelis export: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
