"""Atomic, checksummed checkpoint folders: tensors as safetensors, everything else as JSON, nothing pickled.

A folder is renamed when it is complete on disk: a process killed at any point leaves the last checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.errors import BadInput, InfraFailure, MissingFile, PixelisError
from pixelis.files import sync, write_json
from pixelis.policy.distributed import broadcast_text, rank_and_world_size, sum_over_workers
from pixelis.policy.tensor_parts import Part, StoredTensors, files_of, part_name, save_tensors, stem_of

MANIFEST = "manifest.json"
TIMEOUT_S = 3600.0
"""Seconds that the first worker waits for the files of the others."""
_NAME = re.compile(r"step_(\d{8})$")


class Writer:
    """Writes the checkpoints of a group of workers in a thread, each worker its own files into one shared folder."""

    def __init__(self, worker: int = 0, workers: int = 1):
        self.worker, self.workers = worker, workers
        self._thread: threading.Thread | None = None
        self._error: PixelisError | None = None

    def start(
        self,
        run_dir: str | Path,
        step: int,
        tensors: Mapping[str, Mapping[str, np.ndarray | Part]],
        texts: Mapping[str, Any],
        headers: Mapping[str, dict[str, str]] | None = None,
        keep: int = 0,
        best: int | None = None,
    ) -> Path:
        """Begin to write `run_dir/checkpoints/step_NNNNNNNN` and return it. All workers call it together.

        tensors: file stem -> name -> this worker's array or part, not to be changed before `wait` returns;
        texts: file stem -> JSON value. Afterwards all but the newest `keep` checkpoints (0: none) and `best`
        are removed. Raises the failure of the checkpoint before.
        """
        self.wait()
        final = Path(run_dir) / "checkpoints" / f"step_{step:08d}"
        try:
            temporary = Path(broadcast_text(str(_create_temporary(final)) if not self.worker else ""))
        except OSError as error:
            raise _disk_failure(final, error) from None
        if not temporary.is_dir():
            message, fix = f"{temporary} does not exist on this node", "set run.dir to storage of all nodes"
            raise InfraFailure(message, code="no_shared_storage", fix=fix)

        def write() -> None:
            try:
                paths = []
                for stem, arrays in tensors.items():
                    if arrays:
                        paths.append(temporary / part_name(stem, self.worker, self.workers))
                        save_tensors(arrays, paths[-1], (headers or {}).get(stem))
                for stem, value in texts.items() if not self.worker else ():
                    paths.append(temporary / f"{stem}.json")
                    paths[-1].write_text(json.dumps(value, indent=1), encoding="utf-8")
                if self._gather(temporary, _flush(paths)):
                    _rename(temporary, final)
                    if keep:
                        prune(run_dir, keep, best)
            except OSError as error:
                self._fail(temporary, _disk_failure(final, error))
            except PixelisError as error:
                self._fail(temporary, error)
            except BaseException as error:
                self._fail(temporary, InfraFailure(f"{final.name} could not be written: {error!r}"))

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()
        return final

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. Raises its InfraFailure."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _gather(self, folder: Path, entries: dict[str, Any]) -> bool:
        if self.worker:
            write_json(folder / f".worker-{self.worker}.json", entries)
            return False
        deadline = time.monotonic() + TIMEOUT_S
        for worker in range(1, self.workers):
            path = folder / f".worker-{worker}.json"
            while not path.is_file():
                if time.monotonic() > deadline:
                    raise InfraFailure(f"worker {worker} did not write its part in {TIMEOUT_S:g} s")
                time.sleep(0.02)
            written = json.loads(path.read_text(encoding="utf-8"))
            if "error" in written:
                message = f"worker {worker} could not write its part: {written['error']}"
                raise InfraFailure(message, code="disk_full")
            entries |= written
            path.unlink()
        _write_manifest(folder, entries)
        return True

    def _fail(self, folder: Path, error: PixelisError) -> None:
        self._error = error
        if not self.worker:
            shutil.rmtree(folder, ignore_errors=True)
            return
        with contextlib.suppress(OSError):  # this worker's own failure ends the run before TIMEOUT_S
            write_json(folder / f".worker-{self.worker}.json", {"error": str(error)})


def write(
    run_dir: str | Path,
    step: int,
    tensors: Mapping[str, Mapping[str, np.ndarray | Part]],
    state: Mapping[str, Any],
    keep: int = 0,
    headers: Mapping[str, dict[str, str]] | None = None,
    notes: Mapping[str, Any] | None = None,
    best: int | None = None,
) -> Path:
    """`Writer.start` and `wait` for one worker. state: `state.json`; notes: file stem -> JSON value."""
    writer = Writer()
    folder = writer.start(run_dir, step, tensors, {"state": state, **(notes or {})}, headers, keep, best)
    writer.wait()
    return folder


def _disk_failure(path: Path, error: OSError) -> InfraFailure:
    code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "disk_failed"
    fix = f"check the disk of {path.parent} and its space; a run resumes from its last checkpoint"
    return InfraFailure(f"{path} could not be written: {error.strerror or error}", code=code, fix=fix)


def link_best(run_dir: str | Path, step: int) -> None:
    """Point the link `run_dir/best` to the checkpoint of a step."""
    link = Path(run_dir) / "best"
    aside = link.with_name(f".best.{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(Path("checkpoints") / f"step_{step:08d}", target_is_directory=True)
    aside.replace(link)


def write_folder(final: str | Path, fill: Callable[[Path], None]) -> None:
    """Create `final` atomically, filled by `fill`, with a manifest."""
    final = Path(final)
    try:
        temporary = _create_temporary(final)
        try:
            fill(temporary)
            _write_manifest(temporary, _flush(sorted(p for p in temporary.iterdir() if p.is_file())))
            _rename(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise _disk_failure(final, error) from None


def _create_temporary(final: Path) -> Path:
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_orphans(final.parent, f".{final.name}.*.aside")
    temporary = final.with_name(f".{final.name}.{_owner()}.aside")
    temporary.mkdir()
    return temporary


def _flush(paths: list[Path]) -> dict[str, Any]:
    """Flush files to disk; returns their entries in the manifest."""
    entries = {}
    for path in paths:
        entries[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        sync(path)
    return entries


def _write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    text = json.dumps({"files": dict(sorted(entries.items()))}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    sync(folder / MANIFEST)
    sync(folder)


def _rename(temporary: Path, final: Path) -> None:
    old = final.with_name(f".{final.name}.{_owner()}.old")
    if final.exists():  # rename() does not replace a folder with files, so the old one is renamed first
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(temporary, final)
    shutil.rmtree(old, ignore_errors=True)
    sync(final.parent)


def is_complete(folder: str | Path, verify: bool = True, share: tuple[int, int] = (0, 1)) -> bool:
    """True if every file of the manifest has its size and, with `verify`, its checksum.

    share: (worker, workers); each verifies some of the files.
    """
    folder, (worker, workers) = Path(folder), share
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        if not files:
            return False
        for index, (name, entry) in enumerate(files.items()):
            path, is_read = folder / name, verify and index % workers == worker
            if path.stat().st_size != entry["bytes"] or (is_read and file_sha256(path) != entry["sha256"]):
                return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def latest(run_dir: str | Path, verify: bool = True) -> Path | None:
    """The newest complete checkpoint of a run, or None. Skips incomplete and, with `verify`, corrupt ones."""
    _finish_replacements(Path(run_dir) / "checkpoints")
    return next((path for _, path in reversed(_steps(run_dir)) if is_complete(path, verify)), None)


def latest_of_workers(run_dir: str | Path) -> Path | None:
    """`latest` of a learner that starts: all workers agree, and verify a share of the files.

    Removes what interrupted writes left, since no other learner of the run is writing.
    """
    worker, workers = rank_and_world_size()
    if not worker:
        _finish_replacements(Path(run_dir) / "checkpoints", nobody_writes=True)
        for path in (Path(run_dir) / "checkpoints").glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)
    candidates = [path for _, path in _steps(run_dir)]
    while name := broadcast_text(candidates.pop().name if candidates else ""):
        path = Path(run_dir) / "checkpoints" / name
        if not sum_over_workers([float(not is_complete(path, share=(worker, workers)))])[0]:
            return path
    return None


def read(folder: str | Path, verify: bool = True) -> tuple[dict[str, StoredTensors], dict[str, Any]]:
    """(tensors by file stem and name, state) of a checkpoint. Raises MissingFile, BadInput."""
    folder = Path(folder)
    if not folder.is_dir():
        raise MissingFile(f"no checkpoint {folder}", fix="name a folder below checkpoints/ of a run")
    if not is_complete(folder, verify):
        message = f"checkpoint {folder} is incomplete or damaged"
        raise BadInput(message, code="damaged_checkpoint", fix="use an older one")
    stems = sorted({stem_of(path) for path in folder.glob("*.safetensors")})
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return {stem: StoredTensors(files_of(folder, stem)) for stem in stems}, state


def steps(run_dir: str | Path) -> set[int]:
    """Steps of the checkpoints of a run, complete or not."""
    return {step for step, _ in _steps(run_dir)}


def step_of(folder: str | Path) -> int:
    if match := _NAME.fullmatch(Path(folder).name):
        return int(match[1])
    raise BadInput(f"{folder} is not named like a checkpoint (step_00000010)")


def prune(run_dir: str | Path, keep: int, best: int | None = None) -> None:
    """Remove all but the newest `keep` complete checkpoints and `best`, and what ended processes left."""
    folders = _steps(run_dir)
    # Checksums were computed when the files were written; reading all of them again could take minutes.
    complete = [step for step, path in folders if is_complete(path, verify=False)]
    for step, path in folders:
        if complete and step < complete[-keep:][0] and step != best:
            shutil.rmtree(path, ignore_errors=True)
    _remove_orphans(Path(run_dir) / "checkpoints", ".step_*")


def file_sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _finish_replacements(root: Path, nobody_writes: bool = False) -> None:
    """Restore the old checkpoint if a process was killed between the two renames of a replacement."""
    for old in root.glob(".step_*.old"):
        final = root / old.name.split(".")[1]
        if (nobody_writes or _is_orphan(old)) and not final.exists():
            os.rename(old, final)


def _remove_orphans(root: Path, pattern: str) -> None:
    for path in root.glob(pattern):
        if _is_orphan(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_orphan(path: Path) -> bool:
    """True if the process in the temporary name has ended; what other machines write is not judged."""
    machine, _, process = path.name.split(".")[-2].partition("-")
    return machine == _machine() and not Path(f"/proc/{process}").exists()


def _owner() -> str:
    return f"{_machine()}-{os.getpid()}"


@functools.cache
def _machine() -> str:
    """This machine, or container, since its last start."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return hashlib.sha256(f"{socket.gethostname()} {boot}".encode()).hexdigest()[:8]


def _steps(run_dir: str | Path) -> list[tuple[int, Path]]:
    root = Path(run_dir) / "checkpoints"
    return sorted((int(m.group(1)), p) for p in root.glob("step_*") if (m := _NAME.fullmatch(p.name)))
