"""Export a policy for other programs: a PEFT adapter, or with --merge a Hugging Face model folder.

usage: pixelis export CHECKPOINT OUT [--merge] [--model FOLDER] [--dtype bfloat16|float16|float32] [--dry-run]

CHECKPOINT is a checkpoint, or a run: then its best one, or without evaluations the last. transformers with PEFT,
and vLLM with --enable-lora, load the adapter beside the base model; they load the merged folder like any other
model. Policies of policy.full=true can only be merged.

  --model FOLDER   base model; default: policy.model of the run
  --dtype TYPE     type of a merged model's weights; default: as in the base model
  --dry-run        check everything and write nothing
"""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from pixelis.errors import BadInput, InfraFailure, MissingFile
from pixelis.files import sync
from pixelis.jobs.command import command
from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_adapter
from pixelis.policy.model_path import fingerprint, resolve


def export(
    source: Path,
    out: Path,
    *,
    merge: bool,
    model: str | None = None,
    dtype: str | None = None,
    dry_run: bool = False,
) -> str:
    """Write the export; returns a description. BadInput if ``out`` exists, InfraFailure for a small disk."""
    is_run = (source / "checkpoints").is_dir()
    best = (source / "best").resolve() if is_run else source
    folder = best if best.is_dir() else checkpoint.latest(source)
    if folder is None or not folder.is_dir():
        raise MissingFile(f"no checkpoint in {source}", fix="name a run, or RUN/checkpoints/step_00000010")
    policy = load_adapter(folder, lazily=True)
    run = folder.parent.parent / "config.yaml"
    trained = yaml.safe_load(run.read_text(encoding="utf-8"))["policy"] if run.is_file() else {}
    base = _base_model(folder, model or trained.get("model"), policy.base_sha256)
    family = trained.get("family")
    if policy.kind == "full" and not merge:
        raise BadInput(f"{folder} holds all parameters, which are no adapter", fix="add --merge")
    size = sum(file.stat().st_size for file in base.glob("*.safetensors")) if merge else policy.nbytes
    size *= 2 if merge and dtype == "float32" else 1
    if out.exists():
        raise BadInput(f"{out} exists", fix="name a new folder, or remove this one")
    disk = next(folder for folder in out.absolute().parents if folder.is_dir())
    if (free := shutil.disk_usage(disk).free) < size:
        message = f"{out} needs {size / 1e9:.1f} GB, {disk} has {free / 1e9:.1f} GB"
        raise InfraFailure(message, code="disk_full", fix="choose another disk")
    text = f"{'merged model' if merge else 'PEFT adapter'} of {folder} on {base}, {size / 1e9:.3f} GB"
    if dry_run:
        return f"{text}: would be written to {out}"
    import torch  # takes seconds to import, which a refusal does without

    from pixelis.families.spec import model_family
    from pixelis.policy import export as formats

    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        if merge:
            own_dtype = getattr(torch, dtype) if dtype else None
            formats.write_merged_model(policy, base, aside, own_dtype, family)
        else:
            text_only = not model_family(base, family).reads_images
            formats.write_peft(policy, aside, str(base), text_only=text_only)
        # A crash after the rename must not leave empty files under the final name
        for file in aside.iterdir():
            sync(file)
        aside.rename(out)
    except OSError as error:
        message = f"{out} could not be written: {error}"
        raise InfraFailure(message, code="disk_full", fix="free the disk, or choose another") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return f"{text}: written to {out}"


def _base_model(folder: Path, name: str | None, sha256: str) -> Path:
    """Folder of the base model. MissingFile without a name, BadInput if it is another model."""
    if name is None:
        raise MissingFile(f"{folder} is in no run folder", fix="name the base model with --model FOLDER")
    model = resolve(name)
    if sha256 and fingerprint(model) != sha256:
        raise BadInput(f"{folder} belongs to another base model than {name}", fix="name it with --model")
    return model


def main() -> None:
    with command("export", __doc__) as parser:
        parser.add_argument("checkpoint", type=Path)
        parser.add_argument("out", type=Path)
        parser.add_argument("--merge", action="store_true")
        parser.add_argument("--model")
        parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
        parser.add_argument("--dry-run", action="store_true")
        a = parser.parse_args()
        print(export(a.checkpoint, a.out, merge=a.merge, model=a.model, dtype=a.dtype, dry_run=a.dry_run))


if __name__ == "__main__":
    main()
