"""Atomic, checksummed checkpoint folders: tensors as safetensors, everything else as JSON, nothing pickled.

A folder is written under a temporary name, flushed to disk and renamed. A process killed at any point leaves the last complete
checkpoint in place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from pixelis.errors import BadInput, MissingFile

MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8})$")


def write_json(path: str | Path, value: Any) -> None:
    """Replace a JSON file atomically: readers see the old content or the new."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.aside")
    try:
        temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def write(
    run_dir: str | Path,
    step: int,
    tensors: Mapping[str, Mapping[str, np.ndarray]],
    state: Mapping[str, Any],
    keep: int = 0,
    headers: Mapping[str, dict[str, str]] | None = None,
    notes: Mapping[str, Any] | None = None,
    best: int | None = None,
) -> Path:
    """Write `run_dir/checkpoints/step_NNNNNNNN` and return it; prune to the newest `keep` (0: keep all) and that of step `best`.

    tensors: file stem -> name -> array, each stored as `STEM.safetensors`; state: JSON values, stored as `state.json`; headers:
    file stem -> metadata of that safetensors file; notes: file stem -> further JSON values. Replaces a complete checkpoint of the
    same step. Raises OSError if writing fails.
    """

    def fill(folder: Path) -> None:
        for stem, arrays in tensors.items():
            contiguous = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
            save_file(contiguous, folder / f"{stem}.safetensors", metadata=(headers or {}).get(stem))
        for stem, value in {"state": state, **(notes or {})}.items():
            (folder / f"{stem}.json").write_text(json.dumps(value, indent=1), encoding="utf-8")

    final = Path(run_dir) / "checkpoints" / f"step_{step:08d}"
    write_folder(final, fill)
    if keep:
        prune(run_dir, keep, best)
    return final


def link_best(run_dir: str | Path, step: int) -> None:
    """Point the link `run_dir/best` to the checkpoint of a step."""
    link = Path(run_dir) / "best"
    aside = link.with_name(f".best.{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(Path("checkpoints") / f"step_{step:08d}", target_is_directory=True)
    aside.replace(link)


def write_folder(final: str | Path, fill: Callable[[Path], None]) -> None:
    """Call `fill` with a temporary folder, add the manifest, flush all files and rename the folder to `final`."""
    final = Path(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.aside")
    _remove_orphans(final.parent, f".{final.name}.*.aside")
    temporary.mkdir()
    try:
        fill(temporary)
        files = sorted(p for p in temporary.iterdir() if p.is_file())
        manifest = {p.name: {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in files}
        (temporary / MANIFEST).write_text(json.dumps({"files": manifest}, indent=1), encoding="utf-8")
        for path in (*files, temporary / MANIFEST):
            _sync(path)
        _sync(temporary)
        if final.exists():
            # rename() does not replace a folder with files, so the old one is renamed first.
            old = final.with_name(f".{final.name}.{os.getpid()}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
            os.rename(temporary, final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(final.parent)


def is_complete(folder: str | Path, verify: bool = True) -> bool:
    """True if the manifest exists and every file has its size and, with `verify`, its checksum."""
    folder = Path(folder)
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        if not files:
            return False
        for name, entry in files.items():
            path = folder / name
            if path.stat().st_size != entry["bytes"] or (verify and file_sha256(path) != entry["sha256"]):
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def latest(run_dir: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, or None. Skips incomplete and corrupt ones."""
    _finish_replacements(Path(run_dir) / "checkpoints")
    return next((path for _, path in reversed(_steps(run_dir)) if is_complete(path)), None)


def read(folder: str | Path) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """(tensors, state) as passed to `write`. Raises MissingFile without a checkpoint, BadInput for a damaged one."""
    folder = Path(folder)
    if not folder.is_dir():
        raise MissingFile(f"no checkpoint {folder}", fix="name a folder below checkpoints/ of a run")
    if not is_complete(folder):
        raise BadInput(f"checkpoint {folder} is incomplete or damaged", code="damaged_checkpoint", fix="use an older one")
    tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    return tensors, json.loads((folder / "state.json").read_text(encoding="utf-8"))


def steps(run_dir: str | Path) -> set[int]:
    """Steps of the checkpoints of a run, complete or not."""
    return {step for step, _ in _steps(run_dir)}


def step_of(folder: str | Path) -> int:
    """Step in the name of a checkpoint folder. Raises BadInput for another name."""
    match = _NAME.fullmatch(Path(folder).name)
    if not match:
        raise BadInput(f"{folder} is not named like a checkpoint (step_00000010)")
    return int(match.group(1))


def prune(run_dir: str | Path, keep: int, best: int | None = None) -> None:
    """Remove all but the newest `keep` complete checkpoints and that of step `best`, and the remains of interrupted writes."""
    folders = _steps(run_dir)
    # Checksums were computed when the files were written; reading all of them again would take minutes for a large model.
    complete = [path for _, path in folders if is_complete(path, verify=False)]
    if not complete:
        return
    oldest = step_of(complete[-keep:][0])
    for step, path in folders:
        if step < oldest and step != best:
            shutil.rmtree(path, ignore_errors=True)
    _remove_orphans(Path(run_dir) / "checkpoints", ".step_*")


def file_sha256(path: str | Path) -> str:
    """Checksum of a file, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _finish_replacements(root: Path) -> None:
    """Restore the old checkpoint if a process was killed between the two renames of a replacement."""
    for old in root.glob(".step_*.old"):
        final = root / old.name.split(".")[1]
        if _is_orphan(old) and not final.exists():
            os.rename(old, final)


def _remove_orphans(root: Path, pattern: str) -> None:
    for path in root.glob(pattern):
        if _is_orphan(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_orphan(path: Path) -> bool:
    """True if the process whose id is in the temporary name has ended, or is this one, which is not writing now."""
    owner = path.name.split(".")[-2]
    return owner.isdigit() and (int(owner) == os.getpid() or not Path(f"/proc/{owner}").exists())


def _steps(run_dir: str | Path) -> list[tuple[int, Path]]:
    root = Path(run_dir) / "checkpoints"
    return sorted((int(m.group(1)), p) for p in root.glob("step_*") if (m := _NAME.fullmatch(p.name)))


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
