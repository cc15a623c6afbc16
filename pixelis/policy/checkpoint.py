"""Checkpoints: a folder that is either complete and checksummed or not there at all. Tensors in safetensors, else JSON.

Written aside, flushed to disk, then renamed: a process killed at any byte leaves the last complete checkpoint in place. Nothing
is ever pickled.
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
    """Replace a JSON file in one piece: readers see the old content or the new, never half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
    try:
        with open(aside, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    _sync(path.parent)


def write(
    run_dir: str | Path,
    step: int,
    tensors: Mapping[str, Mapping[str, np.ndarray]],
    state: Mapping[str, Any],
    keep: int = 0,
    headers: Mapping[str, dict[str, str]] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Path:
    """Write `run_dir/checkpoints/step_NNNNNNNN` and return it; prune to the newest `keep` (0: keep all).

    tensors: file stem -> name -> array, each stored as `STEM.safetensors`; state: anything JSON takes, stored as `state.json`;
    headers: file stem -> texts for the header of that safetensors file; notes: file stem -> what else is kept as JSON. A complete
    checkpoint of the same step is replaced. Raises OSError when the disk refuses.
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
        prune(run_dir, keep)
    return final


def write_folder(final: str | Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a folder aside, add the manifest, flush all and rename the folder to `final`."""
    final = Path(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.with_name(f".{final.name}.{os.getpid()}.aside")
    for left in final.parent.glob(f".{final.name}.*.aside"):  # of a process that was killed
        if _abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    aside.mkdir()
    try:
        fill(aside)
        files = sorted(p for p in aside.iterdir() if p.is_file())
        manifest = {p.name: {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in files}
        (aside / MANIFEST).write_text(json.dumps({"files": manifest}, indent=1), encoding="utf-8")
        for path in (*files, aside / MANIFEST):
            _sync(path)
        _sync(aside)
        if final.exists():
            # rename() does not replace a folder that holds something; the old one steps aside for an instant.
            old = final.with_name(f".{final.name}.{os.getpid()}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
            os.rename(aside, final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _sync(final.parent)


def is_complete(folder: str | Path) -> bool:
    """True when the manifest is there and every file has its size and checksum."""
    folder = Path(folder)
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        if not files:
            return False
        for name, entry in files.items():
            path = folder / name
            if path.stat().st_size != entry["bytes"] or file_sha256(path) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def latest(run_dir: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, or None. Torn and corrupt ones are passed over, never repaired."""
    _finish_replacements(Path(run_dir) / "checkpoints")
    return next((path for _, path in reversed(_steps(run_dir)) if is_complete(path)), None)


def read(folder: str | Path) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """(tensors, state) as given to `write`. Raises MissingFile for no checkpoint, BadInput for a damaged one."""
    folder = Path(folder)
    if not folder.is_dir():
        raise MissingFile(f"no checkpoint {folder}", fix="name a folder below checkpoints/ of a run")
    if not is_complete(folder):
        raise BadInput(f"checkpoint {folder} is incomplete or damaged", code="damaged_checkpoint", fix="use an older one")
    tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    return tensors, json.loads((folder / "state.json").read_text(encoding="utf-8"))


def step_of(folder: str | Path) -> int:
    """The step that a checkpoint folder's name tells."""
    match = _NAME.fullmatch(Path(folder).name)
    if not match:
        raise BadInput(f"{folder} is not named like a checkpoint (step_00000010)")
    return int(match.group(1))


def prune(run_dir: str | Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints, and what an interrupted write left behind."""
    folders = _steps(run_dir)
    complete = [path for _, path in folders if is_complete(path)]
    if not complete:
        return
    oldest = step_of(complete[-keep:][0])
    for step, path in folders:
        if step < oldest:
            shutil.rmtree(path, ignore_errors=True)
    for left in (Path(run_dir) / "checkpoints").glob(".step_*"):
        if _abandoned(left):
            shutil.rmtree(left, ignore_errors=True)


def file_sha256(path: str | Path) -> str:
    """Checksum of a file, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _finish_replacements(root: Path) -> None:
    """A process killed between the two renames of a replacement left the old checkpoint under another name: put it back."""
    for old in root.glob(".step_*.old"):
        final = root / old.name.split(".")[1]
        if _abandoned(old) and not final.exists():
            os.rename(old, final)


def _abandoned(aside: Path) -> bool:
    """Whether the process whose id the folder carries is gone (or is this one, which is not writing now)."""
    owner = aside.name.split(".")[-2]
    return owner.isdigit() and (int(owner) == os.getpid() or not Path(f"/proc/{owner}").exists())


def _steps(run_dir: str | Path) -> list[tuple[int, Path]]:
    root = Path(run_dir) / "checkpoints"
    found = [(int(m.group(1)), p) for p in root.iterdir() if (m := _NAME.fullmatch(p.name))] if root.is_dir() else []
    return sorted(found)


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
